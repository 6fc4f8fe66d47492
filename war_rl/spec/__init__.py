# SPDX-License-Identifier: Apache-2.0
"""Suffix drafting: which text exists, what it predicts, and how much of the prediction is worth verifying."""

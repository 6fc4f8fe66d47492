# SPDX-License-Identifier: Apache-2.0
"""Environments that ship with War-RL. Plain Python: no trainer and no engine is imported here."""

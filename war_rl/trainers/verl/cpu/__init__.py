# SPDX-License-Identifier: Apache-2.0
"""verl on a machine without an accelerator. See docs/compatibility.md for the list of obstacles and remedies."""

# SPDX-License-Identifier: Apache-2.0
"""``war-rl report``: one self-contained HTML page about a run, or about two."""

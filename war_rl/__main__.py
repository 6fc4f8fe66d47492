# SPDX-License-Identifier: Apache-2.0
"""``python -m war_rl`` is ``war-rl``."""

import sys

from war_rl.cli import main

if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Which turn runs where and when. Pure: standard library and numpy, with the clock and the seed passed in."""

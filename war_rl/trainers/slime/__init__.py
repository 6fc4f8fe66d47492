# SPDX-License-Identifier: Apache-2.0
"""War-RL behind slime's own seams: an HTTP router for its engines and a drop-in rollout function."""

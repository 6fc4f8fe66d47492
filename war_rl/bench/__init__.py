# SPDX-License-Identifier: Apache-2.0
"""The rollout benchmark: the same recorded work under two rollouts, interleaved, compared to the token."""

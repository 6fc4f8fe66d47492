# SPDX-License-Identifier: Apache-2.0
"""An agent-loop manager as a user may bring it."""

from __future__ import annotations

from war_rl.trainers.verl.agent_loop import WarAgentLoopManager


class OwnManager(WarAgentLoopManager):
    """Adds nothing."""

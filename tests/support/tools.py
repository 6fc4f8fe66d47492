# SPDX-License-Identifier: Apache-2.0
"""A function tool as verl's users write them; loaded by ``rollout.multi_turn.function_tool_path``."""

from verl.tools.function_tool import function_tool


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: one of them.
        b: the other.
    """
    return f"sum={a + b}"

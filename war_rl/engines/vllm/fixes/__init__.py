# SPDX-License-Identifier: Apache-2.0
"""One module per bug of vLLM's CPU engine.

Each has ``BUG`` (what and in which versions), ``is_present()`` (asks the behaviour, not the version) and ``mend()``.
:mod:`war_rl.engines.vllm.cpu_fixes` puts them to use.
"""

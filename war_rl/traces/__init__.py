# SPDX-License-Identifier: Apache-2.0
"""Recorded agent trajectories: reading them (:mod:`.readers`), turning them into tokens (:mod:`.tokenise`,
:mod:`.synthetic`) and into work for a replayer (:mod:`.workload`)."""

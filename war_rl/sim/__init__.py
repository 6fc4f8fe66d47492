# SPDX-License-Identifier: Apache-2.0
"""A rollout step without engines: events drive the real scheduler over modelled replicas (docs/scaling.md)."""

# SPDX-License-Identifier: Apache-2.0
"""An executor that keeps the engine's only worker in the engine's own process; for machines without an accelerator.

verl asks for vLLM's ``mp`` executor: a second process, and both poll shared memory without pause while they wait for
each other (vLLM's ``SpinCondition``, one second long). With two replicas on two cores that is four spinners on the
cores that the model needs. vLLM's own ``uni`` executor has one process, but its CPU platform turns that name into
``mp``, because only ``mp`` can set OpenMP's variables; here they are set before the engine starts.
"""

from __future__ import annotations

from vllm.v1.executor.uniproc_executor import UniProcExecutor


class OneProcessExecutor(UniProcExecutor):
    """vLLM's in-process executor, with a rendezvous of which no other engine can take the port.

    vLLM looks for a free port and opens it later: engines that start at the same time can find the same one
    ("EADDRINUSE"). A worker that has nobody to meet can leave the choice to the system.
    """

    def _distributed_args(self) -> tuple[str, int, int]:
        if self.parallel_config.world_size > 1:
            raise ValueError(
                f"{type(self).__module__}.{type(self).__name__} holds one worker; with "
                f"{self.parallel_config.world_size} workers per replica use distributed_executor_backend=mp"
            )
        _, rank, local_rank = super()._distributed_args()
        return "tcp://127.0.0.1:0", rank, local_rank

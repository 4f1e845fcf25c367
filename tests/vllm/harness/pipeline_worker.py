"""A CPU worker with pipeline stages. Without compilation, vLLM's own lacks a buffer that later stages need."""

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class PipelineCPUWorker(CPUWorker):  # type: ignore[misc]  # vLLM is not there when types are checked
    """`worker_cls` of engines with several stages."""

    def compile_or_warm_up_model(self):
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )
        return super().compile_or_warm_up_model()

"""vLLM's worker, whose runner can verify drafts in the steps that carry some.

An engine-wide speculative configuration would do too, but it pads steps, takes CUDA graphs away
from plain decoding and refuses some sampling parameters. So it is set only for those steps.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import SpeculativeConfig
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.rejection_sampler import RejectionSampler

from . import internals

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class NoDrafter:
    """The drafter that vLLM asks after a verifying step. It never drafts."""

    def __init__(self, *args: Any) -> None: ...

    def propose(
        self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any
    ) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


class LynxWorker(Worker):
    """Give vLLM its path as ``worker_cls``."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        verify_in_steps_with_drafts(self.model_runner)


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Each request's value for each of its drafts: what vLLM's function of this name is to do.

    Its kernel for CPUs writes whole numbers into a copy instead, so that logits are divided by
    whatever the memory held; those of greedy requests too, beside one that samples.

    Args:
        x: [requests], for example temperatures.
        cu_num_tokens: [requests], the drafts up to and including each request's.
        num_tokens: all drafts.
        replace_from, replace_to: a value that becomes another one.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = x.masked_fill(x == replace_from, replace_to)
    return values.repeat_interleave(counts, output_size=num_tokens)


def verify_in_steps_with_drafts(runner: Any) -> None:
    """Have ``runner`` take vLLM's verifying path in exactly the steps that carry drafts.

    Raises:
        UnsupportedError: the runner is not the one that this was tested with.
    """
    internals.check_names(runner, internals.RUNNER)
    speculative = SpeculativeConfig(
        method="custom_class",
        model=f"{NoDrafter.__module__}.{NoDrafter.__qualname__}",
        num_speculative_tokens=1,
        target_model_config=runner.model_config,
        target_parallel_config=runner.parallel_config,
    )
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    runner.rejection_sampler = RejectionSampler(runner.sampler, speculative, runner.device)
    runner.drafter = NoDrafter()
    runner.effective_drafter_max_model_len = runner.max_model_len
    execute, sample = runner.execute_model, runner.sample_tokens

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        runner.speculative_config = speculative if drafts else None
        output = execute(scheduler_output, *args, **kwargs)
        if runner.execute_model_state is None:  # nothing is left for sample_tokens()
            runner.speculative_config = None
        return output

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        try:
            return sample(*args, **kwargs)
        finally:
            runner.speculative_config = None

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens

"""vLLM's scheduler, withholding what was computed on coarse pages until it is verified.

A request on coarse pages decodes like any other, but its tokens are drafts and nobody gets them.
When its residuals are there, it is rewound to what the store gave it; stock code then computes the
rest of the prompt and all drafts in one pass on refined pages, and accepts, corrects and emits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.request import Request, RequestStatus

from ...errors import ConfigError
from ...states import State
from . import internals
from .policy import Policy
from .provisional import Provisional
from .state import Drafting, Phase, Step

_NEVER = 1 << 60


class LynxScheduler(Scheduler):
    """Give vLLM its path as ``scheduler_cls``.

    Raises:
        UnsupportedError: vLLM is not one that this was tested with.
        ConfigError: the engine is configured in a way that cannot work.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        internals.check_version()
        super().__init__(*args, **kwargs)
        internals.check_names(self, internals.SCHEDULER)
        internals.check_names(Request, internals.REQUEST)
        internals.check_names(self.kv_cache_manager.coordinator, internals.COORDINATOR)
        internals.check_configuration(self.vllm_config, self.use_v2_model_runner)
        from .connector import LynxConnector

        if not isinstance(self.connector, LynxConnector):
            raise ConfigError(
                "progressive decode needs kv_connector LynxConnector with kv_connector_module_path "
                f"lynx_backend.integrations.vllm.connector, found {type(self.connector).__name__}"
            )
        self._drafting: dict[str, Drafting] = self.connector.drafting
        self._stats = self.connector.stats
        self._tracer = self.connector.tracer
        settings = self.connector.settings
        self.policy = Policy(settings.draft, settings.max_drafts)
        self._provisional = Provisional(settings.provisional)
        self._began = 0.0
        self.connector.arm()
        self._overriding = True
        self._override(False)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._began = now = time.monotonic()
        if self._overriding != bool(self._drafting):
            self._override(not self._overriding)
        if not self._drafting:
            return super().schedule(*args, **kwargs)
        rewound = self._take_due_steps(now)
        out = super().schedule(*args, **kwargs)
        for request_id in out.num_scheduled_tokens:
            drafting = self._drafting.get(request_id)
            if drafting is None:
                continue
            if drafting.phase is Phase.LOADING:
                drafting.phase = Phase.DRAFTING
            elif drafting.phase is Phase.VERIFYING:
                put_up = out.scheduled_spec_decode_tokens.get(request_id, ())
                self._keep_drafts(self.requests[request_id], drafting, len(put_up))
        self._rebuild_rows(out.scheduled_cached_reqs, rewound)
        return out

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        requests = len(scheduler_output.num_scheduled_tokens)
        if requests and self.connector.armed:
            tokens = scheduler_output.total_num_scheduled_tokens
            self.policy.measured(time.monotonic() - self._began, tokens, requests)
        return super().update_from_output(scheduler_output, *args, **kwargs)

    def make_spec_decoding_stats(self, spec_decoding_stats: Any, *args: Any, **kwargs: Any) -> Any:
        return spec_decoding_stats  # sized by a setting that there is not; Lynx's metrics count

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        drafting = self._drafting.get(request.request_id)
        if drafting is None or drafting.phase is Phase.VERIFYING:
            if drafting is not None:
                self._verified(request.request_id, drafting, len(new_token_ids) - 1)
            result: tuple[list[int], bool] = super()._update_request_with_output(
                request, new_token_ids, *args, **kwargs
            )
            self._trace(request.request_id, "emit", len(result[0]))
            return result
        status, reason = request.status, request.stop_reason
        for token in new_token_ids:
            request.append_output_token_ids(token)
            drafting.withheld += 1
            stop = check_stop(request, self.max_model_len)
            request.status, request.stop_reason = status, reason
            if stop or drafting.full(request.num_output_tokens):
                request.next_decode_eligible_step = _NEVER
                break
        self._trace(request.request_id, "draft", len(new_token_ids))
        self._provisional.drafted(request, new_token_ids)
        return [], False

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        drafting = self._drafting.get(request.request_id)
        if drafting is not None:
            if drafting.coarse:
                self._rewind(request, drafting)
            self._drop(request.request_id, drafting, "preempted")
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        drafting = self._drafting.get(request.request_id)
        if drafting is not None:
            if drafting.held:
                kwargs["delay_free_blocks"] = False  # nothing writes to its blocks any more
            if drafting.coarse:
                drafting.drafts = list(request.output_token_ids)
            self._drop(request.request_id, drafting, "aborted")
        return super()._free_request(request, *args, **kwargs)

    # -- details -----------------------------------------------------------------------------------

    def _override(self, on: bool) -> None:
        """Put in, or take out, what vLLM calls for every request in every step.

        Out while nothing drafts, for then it only takes time. In before the first step in which a
        request on coarse pages may run, publish blocks or free some that a rewind needs.
        """
        self._overriding = on
        coordinator = self.kv_cache_manager.coordinator
        if on:
            self.__dict__.pop("_update_request_with_output", None)
            for name in internals.COORDINATOR:
                setattr(coordinator, name, self._unless_coarse(getattr(coordinator, name)))
        else:
            for name in internals.COORDINATOR:
                vars(coordinator).pop(name, None)
            if self._tracer is None:
                stock = super()._update_request_with_output
                self.__dict__["_update_request_with_output"] = stock

    def _unless_coarse(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """``stock``, which takes a request or its id, for all but those on coarse pages."""

        def method(request: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_coarse(getattr(request, "request_id", request)):
                return stock(request, *args, **kwargs)

        return method

    def _is_coarse(self, request_id: str) -> bool:
        drafting = self._drafting.get(request_id)
        return drafting is not None and drafting.coarse

    def _take_due_steps(self, now: float) -> set[str]:
        """Do what requests need before this step; those that were rewound for verification."""
        rewound: set[str] = set()
        for request_id, drafting in list(self._drafting.items()):
            step = drafting.due(now)
            request = self.requests[request_id]
            if request.num_in_flight_tokens:
                continue
            if step is None:
                if drafting.phase is Phase.LOADING and drafting.arrived is State.COARSE:
                    self._weigh(request, drafting)
            elif step is Step.GIVE_UP:
                drafting.gave_up = True
                self.connector.order_drop(request_id)
            elif step is Step.REFINE:
                self._refine(request, drafting, rewound)
            elif request.status == RequestStatus.RUNNING:
                self._recompute(request, now)
            elif drafting.held or request_id in self.finished_recving_kv_req_ids:
                self._start_over(request, drafting)
        return rewound

    def _weigh(self, request: Any, drafting: Drafting) -> None:
        """A request with its anchors and no residual: let it draft, or have it wait.

        It is asked again in each step until it runs. vLLM runs it once it is among those that
        finished receiving, so one that waits is taken out of them: it costs nobody anything, keeps
        its place, and goes on in the step in which its residual is there.
        """
        request_id = request.request_id
        if not drafting.held and request_id not in self.finished_recving_kv_req_ids:
            return  # another rank still writes its anchors
        rest = request.num_prompt_tokens - drafting.end
        drafts = self.policy.drafts(drafting.wait, rest, len(self.running))
        if drafts:
            drafting.max_drafts = drafts
            self._let_go(request_id, drafting)
        elif not drafting.held:
            drafting.held = True
            self.finished_recving_kv_req_ids.discard(request_id)
            self._trace(request_id, "wait")

    def _let_go(self, request_id: str, drafting: Drafting) -> None:
        if drafting.held:
            drafting.held = False
            self.finished_recving_kv_req_ids.add(request_id)

    def _refine(self, request: Any, drafting: Drafting, rewound: set[str]) -> None:
        request_id = request.request_id
        waited = drafting.held
        self._let_go(request_id, drafting)
        loading = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        if loading and request_id not in self.finished_recving_kv_req_ids:
            return  # another rank still writes its anchors
        if request.status == RequestStatus.RUNNING:
            self._rewind(request, drafting)
            rewound.add(request_id)
        drafting.phase = Phase.VERIFYING
        self.connector.order_write(request_id)
        self._trace(request_id, "verify", len(drafting.drafts))
        if waited:
            self.policy.waited()
        not_drafted = "waited" if waited else "residual_was_first"
        self._stats.decided("drafted" if drafting.drafts else not_drafted)

    def _rewind(self, request: Any, drafting: Drafting) -> None:
        """Back to what the store gave; the drafts are put up for verification."""
        prompt = request.num_prompt_tokens
        drafting.drafts = request._all_token_ids[prompt:]
        drafting.withheld = 0
        del request._all_token_ids[prompt:]
        del request._output_token_ids[:]
        del request.block_hashes[prompt // self.hash_block_size :]
        request.num_computed_tokens = min(
            request.num_computed_tokens, drafting.end, request.num_prompt_tokens - 1
        )
        request.spec_token_ids = list(drafting.drafts)
        request.next_decode_eligible_step = 0

    def _recompute(self, request: Any, now: float) -> None:
        """The residual is lost or late: drop drafts and pages, as when memory is short."""
        self.connector.compute(request.request_id)
        self.running.remove(request)
        self._preempt_request(request, now)
        # It may run again in this very step, and the runner must not think that it never stopped.
        self.prev_step_scheduled_req_ids.discard(request.request_id)

    def _start_over(self, request: Any, drafting: Drafting) -> None:
        """A request that did not run yet gets no anchors, or no residual: let LMCache load what it
        finds, or compute it if that may take as long again."""
        request_id = request.request_id
        self._let_go(request_id, drafting)
        if drafting.arrived is State.COARSE:
            self._stats.decided("no_residual")
            self.connector.compute(request_id)
        else:
            why = "no_anchor" if drafting.coarse_at is None else "no_residual"
            self.connector.load_plainly(request_id, why)
        self.connector.forget(request_id)
        self.failed_recving_kv_req_ids.add(request_id)
        request.num_computed_tokens = 0

    def _keep_drafts(self, request: Any, drafting: Drafting, put_up: int) -> None:
        """The prompt's rest may take several passes: the last one verifies what fits into it."""
        if request.is_prefill_chunk:
            request.spec_token_ids = list(drafting.drafts)
        else:
            self._stats.drafts("dropped", len(drafting.drafts) - put_up)
            del drafting.drafts[put_up:]

    def _rebuild_rows(self, cached: Any, rewound: set[str]) -> None:
        """Have the runner drop rewound requests' rows and add them again from what is committed."""
        for i, request_id in enumerate(cached.req_ids):
            if request_id in rewound and request_id not in cached.resumed_req_ids:
                cached.resumed_req_ids.add(request_id)
                cached.new_block_ids[i] = self.kv_cache_manager.get_block_ids(request_id)

    def _verified(self, request_id: str, drafting: Drafting, accepted: int) -> None:
        self.connector.verified(request_id)
        drafted = len(drafting.drafts)
        accepted = min(accepted, drafted)
        self._stats.drafts("accepted", accepted)
        self._stats.drafts("rejected", drafted - accepted)
        if drafted:
            self._stats.verified(self.policy.gained(drafted, accepted), drafting.lead)
            self.policy.verified(drafted, accepted)
        self._provisional.verified(self.requests[request_id], accepted)

    def _drop(self, request_id: str, drafting: Drafting, reason: str) -> None:
        """A request leaves drafting without verification."""
        if drafting.coarse:
            lost = drafting.due(time.monotonic()) is Step.RECOMPUTE
            self._stats.decided("no_residual" if lost else reason)
        self._stats.drafts("dropped", len(drafting.drafts))
        self._trace(request_id, "drop", len(drafting.drafts))
        self._provisional.dropped(self.requests[request_id])
        self.connector.forget(request_id)

    def _trace(self, request_id: str, event: str, count: int = 1) -> None:
        if self._tracer is not None:
            self._tracer.note(request_id, event, count)

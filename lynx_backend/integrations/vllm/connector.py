"""vLLM's KV connector: LMCache's, and for requests that may draft, loads that bring anchors first.

LMCache hashes, looks up and saves; what it does not see, it does not save: a request is hidden from
it while its pages hold Q_anchor. The scheduler's half keeps one :class:`Drafting` for each such
request, which :class:`.scheduler.LynxScheduler` drives.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import NewRequestData

from ...errors import ConfigError, UnsupportedError
from ...request_params import STORED
from ...states import State
from ..lmcache_cpu import LMCacheConnectorCPU
from . import internals
from .features import why_engine_does_not_draft, why_request_does_not_draft
from .orders import Load, Orders, Reports
from .settings import DraftSettings
from .state import Drafting
from .stats import DraftPrometheus, DraftStats
from .trace import Tracer

logger = logging.getLogger("vllm.lynx")

#: How often the store is asked for what a prefill engine has still to write.
_ASK_SECONDS = 0.02


class LynxConnector(LMCacheConnectorCPU):
    """Give vLLM its class and module by name; see ``docs/vllm-progressive.md``.

    Without Lynx's scheduler it is LMCache's connector and nothing else.

    Attributes:
        settings: what the user set.
        drafting: in the scheduler's process, the requests between their anchors and their verified
            tokens, by id.
        armed: whether the scheduler withholds drafts.
        stats: what vLLM's log line and metrics will say.
        tracer: writes down what happens to requests, if the user wants that.

    Raises:
        LynxError: LMCache is set up in a way that this does not fit, or a setting is wrong.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.settings = DraftSettings.load(extra)
        self.drafting: dict[str, Drafting] = {}
        self.armed = False
        self.stats = DraftStats()
        self.tracer = Tracer(self.settings.trace_dir) if self.settings.trace_dir else None
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        self._block = vllm_config.cache_config.block_size
        self._offered: set[str] = set()
        self._hidden: dict[str, Any] = {}
        self._to_compute: set[str] = set()
        self._plain: dict[str, str] = {}
        self._coming: dict[str, tuple[float, float]] = {}
        self._orders = Orders()
        self._bound = Orders()
        self._loads: Any = None
        if role == KVConnectorRole.SCHEDULER:
            internals.check_names(self._lmcache_engine, internals.LMCACHE)

    def arm(self) -> None:
        """Draft from now on, unless the settings or the engine forbid it.

        Raises:
            ConfigError: LMCache is set up to load ahead, which leaves no time to draft in.
        """
        if self._lmcache_engine.config.enable_async_loading:
            raise ConfigError(
                "progressive decode brings caches by itself: set LMCache's enable_async_loading to "
                "false"
            )
        why = why_engine_does_not_draft(self._vllm_config, self._kv_cache_config)
        if why is not None:
            logger.warning("Lynx does not draft with this engine: %s", why)
        self.armed = self.settings.draft != "never" and why is None

    # -- the scheduler's half ----------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        request_id = request.request_id
        self._offered.discard(request_id)
        if request_id in self._to_compute:
            self._lmcache_engine.load_specs.pop(request_id, None)
            return 0, False
        found, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if self._is_coming(request):
            return None, False  # asked again in the next step
        if found and self._why_not(request) is None:
            self._offered.add(request_id)
            return found, True
        return found, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        request_id = request.request_id
        drafts = request_id in self._offered and num_external_tokens > 0
        self._offered.discard(request_id)
        # Only now: until its blocks are there, a request is looked up again and again.
        self._to_compute.discard(request_id)
        if not drafts:
            why = self._why_not(request)
            if num_external_tokens and self.armed and why is not None:
                self.stats.decided(why)
            super().update_state_after_alloc(request, blocks, num_external_tokens)
            return
        super().update_state_after_alloc(request, blocks, 0)  # LMCache loads nothing
        spec = self._lmcache_engine.load_specs[request_id]
        first, end = spec.vllm_cached_tokens, spec.vllm_cached_tokens + num_external_tokens
        now = time.monotonic()
        self.drafting[request_id] = Drafting(
            first=first,
            end=end,
            ranks=self._ranks,
            max_drafts=self.settings.max_drafts,
            anchor_deadline=now + self.settings.anchor_seconds,
            residual_seconds=self.settings.residual_seconds,
        )
        if self.tracer is not None:
            prompt = request.num_prompt_tokens
            self.tracer.begin(
                request_id, request.arrival_time, prompt=prompt, stored=end, cached=first
            )
        self._orders.loads.append(
            Load(
                request_id,
                list(request.all_token_ids[: spec.lmcache_cached_tokens]),
                first,
                end,
                list(blocks.get_block_ids()[0]),
                _tags(request),
            )
        )

    def order_write(self, request_id: str) -> None:
        """Have the request's pages made Q_full before the next forward pass."""
        self._orders.writes.append(request_id)

    def order_drop(self, request_id: str) -> None:
        """Have the workers stop the request's load; they report that it failed."""
        self._orders.drops.append(request_id)

    def forget(self, request_id: str) -> None:
        """The request is an ordinary one from now on, or gone; its blocks may be another's."""
        drafting = self.drafting.pop(request_id, None)
        if drafting is not None:
            self._orders.writes = [each for each in self._orders.writes if each != request_id]
            self._orders.drops.append(request_id)

    def verified(self, request_id: str) -> None:
        """The request's drafts were checked on Q_full pages: it is an ordinary one."""
        del self.drafting[request_id]

    def compute(self, request_id: str) -> None:
        """Load nothing when this request is admitted next."""
        self._to_compute.add(request_id)

    def load_plainly(self, request_id: str, why: str) -> None:
        """Let LMCache load this request, if it finds it; ``why`` is a metric's label."""
        self._plain[request_id] = why

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        orders, self._orders = self._orders, Orders()
        orders.lmcache = super().build_connector_meta(self._visible(scheduler_output))
        return orders

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        reports = connector_output.kv_connector_worker_meta
        if isinstance(reports, Reports):
            now = time.monotonic()
            for request_id, counts in reports.ranks.items():
                if request_id in self.drafting:
                    self._note_report(request_id, counts, now)
            for request_id, wait in reports.waits.items():
                if request_id in self.drafting:
                    self.drafting[request_id].wait = wait

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
        request_id = request.request_id
        self.forget(request_id)
        self._hidden.pop(request_id, None)
        self._plain.pop(request_id, None)
        if self._coming.pop(request_id, None) is not None:
            self._lmcache_engine.load_specs.pop(request_id, None)
        for marked in (self._offered, self._to_compute):
            marked.discard(request_id)
        if self.tracer is not None:
            self.tracer.end(request_id)
        result: tuple[bool, Any] = super().request_finished(request, block_ids)
        return result

    def _is_coming(self, request: Any) -> bool:
        """Whether a prefill engine has still to store what it promised, and there is time."""
        request_id = request.request_id
        promised = (request.kv_transfer_params or {}).get(STORED)
        if not isinstance(promised, int):
            return False
        chunk = self._lmcache_engine.config.chunk_size
        spec = self._lmcache_engine.load_specs.get(request_id)
        now = time.monotonic()
        until, asked = self._coming.setdefault(
            request_id, (now + self.settings.anchor_seconds, now)
        )
        if spec is not None and spec.lmcache_cached_tokens >= promised // chunk * chunk:
            self._coming[request_id] = now, now  # should it come back, it does not wait again
        if now >= self._coming[request_id][0]:
            return False
        if now >= asked + _ASK_SECONDS:
            self._lmcache_engine.lookup_client.clear_lookup_status(request_id)
            self._coming[request_id] = until, now
        return True

    def _why_not(self, request: Any) -> str | None:
        """Why LMCache is left to load this request, as a metric's label."""
        if not self.armed:
            return "off"
        if request.request_id in self._plain:
            return self._plain[request.request_id]
        if request.num_preemptions:
            return "preempted"
        return why_request_does_not_draft(request)

    def _visible(self, out: Any) -> Any:
        """The step as LMCache may see it: without requests whose pages are coarse.

        One that was hidden comes as a new request in its first step on exact pages, so that LMCache
        saves from there on what its prompt has beyond the loaded part.
        """
        if not self.drafting and not self._hidden:
            return out
        new = []
        for data in out.scheduled_new_reqs:
            if self._is_coarse(data.req_id):
                self._hidden[data.req_id] = self._request(data.req_id)
            else:
                new.append(data)
        cached = out.scheduled_cached_reqs
        kept = [i for i, name in enumerate(cached.req_ids) if name not in self._hidden]
        for name in cached.req_ids:
            if name in self._hidden and not self._is_coarse(name):
                blocks = self._kv_cache_manager.get_block_ids(name)
                new.append(NewRequestData.from_request(self._hidden.pop(name), blocks))
        columns = {
            f.name: [column[i] for i in kept]
            for f in dataclasses.fields(cached)
            if isinstance(column := getattr(cached, f.name), list)
            and len(column) == len(cached.req_ids)
        }
        cached = dataclasses.replace(cached, **columns)
        return dataclasses.replace(out, scheduled_new_reqs=new, scheduled_cached_reqs=cached)

    def _is_coarse(self, request_id: str) -> bool:
        drafting = self.drafting.get(request_id)
        return drafting is not None and drafting.coarse

    def _request(self, request_id: str) -> Any:
        return self._lmcache_engine._unfinished_requests[request_id]

    def _note_report(self, request_id: str, counts: Counter[State], now: float) -> None:
        drafting = self.drafting[request_id]
        before = drafting.arrived
        drafting.report(counts, now)
        if self.tracer is not None and drafting.arrived is not before:
            if before is State.ABSENT and drafting.arrived is not State.FAILED:
                self.tracer.note(request_id, "anchors")
            if drafting.arrived is State.FULL:
                self.tracer.note(request_id, "residual")

    # -- both halves, for vLLM's statistics --------------------------------------------------------

    def get_kv_connector_stats(self) -> DraftStats | None:
        if not self.armed:
            return None
        return self.stats.take(sum(each.withheld for each in self.drafting.values()))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> DraftStats:
        return DraftStats(data)

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> DraftPrometheus:
        return DraftPrometheus(*args)

    # -- a worker's half ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        engine = self._lmcache_engine.lmcache_engine
        if engine is None:
            raise UnsupportedError("LMCache did not start; its own messages above say why")
        internals.check_names(engine, internals.LMCACHE_ENGINE)
        from ..lmcache_plugin import LynxBackend
        from .loads import Loads
        from .pages import Pages

        backends = engine.storage_manager.storage_backends.values()
        lynx = next((each for each in backends if isinstance(each, LynxBackend)), None)
        if lynx is None:
            raise ConfigError(
                "LMCache runs without Lynx: name it in LMCache's storage_plugins and extra_config, "
                "as docs/vllm-progressive.md shows"
            )

        def keys(load: Load) -> list[Any]:
            engine.lookup_unpin(load.request_id)
            found = engine.token_database.process_tokens(load.tokens, request_configs=load.tags)
            return [lynx.chunk_key(key) for _, _, key in found]

        pages = Pages(engine.gpu_connector, list(kv_caches.values()))
        self._loads = Loads(lynx.store, lynx.layout, keys, pages.write, self._block)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._bound = connector_metadata
        super().bind_connector_metadata(connector_metadata.lmcache)
        # Before the forward pass, which start_load_kv() is not always.
        for request_id in connector_metadata.writes:
            self._loads.write(request_id)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        for request_id in self._bound.drops:
            self._loads.drop(request_id)
        for load in self._bound.loads:
            self._loads.start(load)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        return sent, (received or set()) | self._loads.poll() or None

    def build_connector_worker_meta(self) -> Reports | None:
        news: dict[str, Counter[Any]] = self._loads.news()
        waits: dict[str, float] = self._loads.waits()
        return Reports(news, waits) if news or waits else None

    def shutdown(self) -> None:
        if self._loads is not None:
            self._loads.close()
        super().shutdown()


def _tags(request: Any) -> Any:
    from lmcache.integration.vllm.utils import extract_request_configs_from_sampling_params

    return extract_request_configs_from_sampling_params(request.sampling_params)

"""Names in a request's ``kv_transfer_params``: what engines and proxies are told by them."""

from __future__ import annotations

#: Of the decode side: so many tokens of the prompt were, or are being, stored by a prefill engine.
STORED = "lynx.stored_tokens"
#: Publish this request's drafts under this tag. Of the proxy: true.
PROVISIONAL = "lynx.provisional"

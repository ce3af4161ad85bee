"""An OpenAI-compatible proxy before a prefill and a decode engine."""

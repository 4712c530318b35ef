"""What vLLM 0.32 says, key by key: recorded from its source (`entrypoints/`, `distributed/kv_events.py`, `v1/metrics/`).

`exact` sets must match; a set named `..._AT_LEAST` may grow with the libraries that an engine was installed with.
"""

ERROR = {"message", "type", "param", "code"}

MODEL_CARD = {"id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"}

USAGE = {
    "prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details", "completion_tokens_details",
}  # fmt: skip
PROMPT_DETAILS = {"cached_tokens", "created_cache_tokens", "multimodal_tokens"}
STREAM_USAGE = {"prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details"}

CHAT = {
    "id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage", "prompt_logprobs",
    "prompt_token_ids", "prompt_text", "kv_transfer_params", "ec_transfer_params", "metrics",
}  # fmt: skip
CHAT_CHOICE = {"index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts"}
CHAT_MESSAGE = {"role", "content", "refusal", "annotations", "audio", "function_call", "reasoning"}
CHAT_LOGPROB = {"token", "logprob", "bytes", "top_logprobs"}
CHUNK = {"id", "object", "created", "model", "choices"}
CHAT_FIRST_CHUNK = CHUNK | {"prompt_token_ids", "prompt_text"}
CHAT_CHUNK_CHOICE = {"index", "delta", "logprobs", "finish_reason", "token_ids"}

COMPLETION = {
    "id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage",
    "kv_transfer_params", "ec_transfer_params", "metrics",
}  # fmt: skip
COMPLETION_CHOICE = {
    "index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids",
    "routed_experts",
}  # fmt: skip
COMPLETION_LOGPROBS = {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
COMPLETION_CHUNK_CHOICE = {
    "index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids",
}  # fmt: skip

RESPONSE_AT_LEAST = {
    "id", "created_at", "incomplete_details", "instructions", "metadata", "model", "object", "output",
    "parallel_tool_calls", "temperature", "tool_choice", "tools", "top_p", "background", "max_output_tokens",
    "max_tool_calls", "previous_response_id", "prompt", "reasoning", "service_tier", "status", "text", "top_logprobs",
    "truncation", "usage", "user", "presence_penalty", "frequency_penalty", "kv_transfer_params",
    "ec_transfer_params", "input_messages", "output_messages",
}  # fmt: skip
RESPONSE_USAGE = {"input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details", "total_tokens"}
RESPONSE_EVENTS = [
    "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    "response.output_text.delta", "response.output_text.done", "response.content_part.done",
    "response.output_item.done", "response.completed",
]  # fmt: skip
"""Types in order, repeats folded."""

MESSAGE = {"id", "type", "role", "content", "model", "stop_reason", "usage"}
MESSAGE_USAGE = {"input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"}
MESSAGE_EVENTS = [
    "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
    "message_stop",
]  # fmt: skip

TRANSFER_PARAMS = {
    "do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id",
    "remote_host", "remote_port", "tp_size", "dcp_size", "pp_size", "remote_num_tokens",
    "remote_blocks_expiry_time", "transfer_mode", "remote_prefill_cached_tokens",
}  # fmt: skip

EVENT_SOURCE = {
    "enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", "buffer_steps", "hwm", "max_queue_size",
    "topic",
}  # fmt: skip
BLOCK_STORED = {
    "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
    "extra_keys", "group_idx", "kv_cache_spec_kind",
}  # fmt: skip

SERIES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    'vllm:num_requests_waiting_by_reason{reason="capacity"}',
    'vllm:num_requests_waiting_by_reason{reason="deferred"}',
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    'vllm:prompt_tokens_by_source_total{source="local_compute"}',
    'vllm:prompt_tokens_by_source_total{source="local_cache_hit"}',
    'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}',
    "vllm:prompt_tokens_cached_total",
    "vllm:generation_tokens_total",
    'vllm:request_success_total{finished_reason="stop"}',
    'vllm:request_success_total{finished_reason="length"}',
    'vllm:request_success_total{finished_reason="abort"}',
    'vllm:request_success_total{finished_reason="error"}',
    'vllm:request_success_total{finished_reason="repetition"}',
    "vllm:nixl_num_failed_transfers_total",
    "vllm:nixl_num_failed_notifications_total",
    "vllm:nixl_num_kv_expired_reqs_total",
    "vllm:nixl_num_notifications_after_expiry_total",
}
HISTOGRAMS = {
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:nixl_xfer_time_seconds",
    "vllm:nixl_post_time_seconds",
    "vllm:nixl_bytes_transferred",
    "vllm:nixl_num_descriptors",
}

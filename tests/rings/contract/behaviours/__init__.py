"""The relay's behaviour contract, one test for each row, named after the row's sentence.

``test_table.py`` checks that this table names tests that exist. Rows that are no server behaviour are absent:
1 and 2 are about a repository, 57 to 61 about (de)serialising shapes inside a program, which L1 to L3 cover over HTTP.

=== ==========================================================================================================
row test
=== ==========================================================================================================
3   test_shutdown.test_graceful_shutdown_stops_new_assignments_and_disconnects_after_in_flight_completion
4   test_shutdown.test_graceful_shutdown_times_out_in_flight_work_that_does_not_finish_before_deadline
5   test_shutdown.test_provider_deletion_drains_queued_requests_with_explicit_errors_and_closes_workers
6   test_dispatch.test_request_for_supported_model_dispatches_immediately_without_queueing
7   test_dispatch.test_request_queues_when_all_matching_workers_are_at_capacity
8   test_dispatch.test_selection_prefers_the_lowest_load_among_exact_model_matches
9   test_dispatch.test_models_update_immediately_changes_routing_without_worker_reconnect
10  test_dispatch.test_equally_loaded_exact_matches_rotate_in_round_robin_order
11  test_dispatch.test_pong_updates_live_load_used_for_selection
12  test_dispatch.test_stale_workers_are_expired_after_the_pong_window
13  test_dispatch.test_stale_workers_are_not_selected_for_new_requests
14  test_dispatch.test_idle_workers_without_the_exact_requested_model_remain_ineligible
15  test_dispatch.test_workers_without_the_exact_requested_model_do_not_receive_the_request
16  test_queue.test_queued_requests_are_fifo_within_a_provider_among_compatible_models
17  test_queue.test_canceling_a_queued_request_removes_it_before_dispatch
18  test_queue.test_queued_request_times_out_after_waiting_for_worker_capacity
19  test_queue.test_queue_capacity_exhaustion_rejects_without_waiting_for_timeout
20  test_cancel.test_canceling_an_in_flight_request_emits_a_worker_cancel_signal
21  test_cancel.test_late_worker_chunks_are_dropped_after_the_request_is_canceled
22  test_cancel.test_disconnecting_a_worker_requeues_a_live_in_flight_request
23  test_cancel.test_disconnecting_a_worker_does_not_requeue_a_request_after_it_was_canceled
24  test_cancel.test_repeated_worker_disconnects_stop_requeueing_after_the_max_attempts
25  test_registration.test_worker_can_authenticate_and_receive_a_sanitized_register_ack
26  test_registration.test_register_ack_warns_when_worker_name_is_truncated
27  test_registration.test_register_ack_warns_when_model_list_is_truncated_after_sanitization
28  test_registration.test_register_ack_warns_when_sanitization_accepts_no_models
29  test_registration.test_register_ack_clamps_zero_max_concurrent_to_one
30  test_registration.test_legacy_query_secret_can_authenticate_but_wrong_secret_is_rejected
31  test_registration.test_header_secret_takes_precedence_over_legacy_query_secret_when_both_are_present
32  test_registration.test_repeated_failed_auth_attempts_are_rate_limited_by_client_identity
33  test_registration.test_failed_auth_rate_limit_entries_expire_and_allow_a_later_valid_connection
34  test_registration.test_protocol_version_mismatch_is_rejected_before_registration_completes
35  test_registration.test_unknown_or_disabled_providers_are_rejected_before_register
36  test_responses.test_response_complete_preserves_status_headers_body_and_token_counts_for_success
37  test_responses.test_response_complete_preserves_upstream_error_body_without_flattening_headers
38  test_responses.test_streaming_pass_through_preserves_chunk_order_done_termination_and_completion_metadata
39  test_responses.test_oversized_stream_emits_sse_error_and_terminates_without_delivering_completion
40  test_forwarding.test_openai_chat_completions_http_boundary_preserves_model_stream_flag_and_body
41  test_forwarding.test_openai_responses_http_boundary_preserves_model_stream_flag_and_body
42  test_forwarding.test_anthropic_messages_http_boundary_preserves_model_stream_flag_and_body
43  test_forwarding.test_openai_responses_worker_request_preserves_exact_envelope_and_compatibility_headers
44  test_forwarding.test_openai_chat_completions_worker_request_preserves_exact_envelope_and_compatibility_headers
45  test_forwarding.test_anthropic_messages_worker_request_preserves_exact_envelope_and_compatibility_headers
46  test_failures.test_queue_timeout_http_boundary_returns_sanitized_service_unavailable_text
47  test_failures.test_queue_full_http_boundary_returns_capacity_message_without_internal_reason
48  test_failures.test_no_workers_http_boundary_returns_sanitized_worker_unavailable_text
49  test_failures.test_disabled_provider_http_boundary_returns_sanitized_disabled_message
50  test_failures.test_requeue_exhaustion_http_boundary_returns_sanitized_retry_exhausted_text
51  test_failures.test_provider_deletion_http_boundary_hides_internal_delete_reason_behind_generic_service_error
52  test_catalogue.test_models_endpoint_returns_openai_compatible_catalog_shape_for_advertised_models
53  test_catalogue.test_models_endpoint_tracks_live_worker_model_updates_without_stale_entries
54  test_forwarding.test_openai_streaming_http_boundary_preserves_sse_shape_and_done_marker
55  test_forwarding.test_openai_responses_streaming_http_boundary_preserves_sse_shape_and_done_marker
56  test_forwarding.test_anthropic_streaming_http_boundary_preserves_event_sse_shape
L1  test_admin_keys.test_create_key_deserializes_into_shared_type
L2  test_admin_keys.test_list_keys_deserializes_into_shared_type
L3  test_admin_keys.test_full_key_lifecycle_via_shared_types
=== ==========================================================================================================
"""

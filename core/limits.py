"""Limits of a server process: every bound and time-out of ours, what it is counted in, and what happens at it.

``limits()`` is read where a bound applies; whoever serves each request takes its section once, when it is built. No module
keeps a number of its own; ``tests/unit/test_architecture.py`` names the few that are no bounds. ``docs/settings.md`` is made
from the limits of this file that a variable sets.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wire.limits import MIB, WIRE, bound


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLimits:
    """Database, hints and throttles of every process."""

    # Work for the database
    database_s: float = bound(
        5.0, "s", "A call that waits or runs so long ends with 503; upkeep gives up a connection silent for so long."
    )
    database_waiting: int = bound(1000, "calls", "One more call that runs or waits is refused with 503 at once.")
    database_threads: int = bound(4, "threads", "Further calls wait for a thread.")
    database_silence_s: float = bound(
        30.0,
        "s",
        "Control plane and worker [give up](troubleshoot.md#postgresql-does-not-answer) a silent database. "
        "Set more where single statements take longer.",
        setting="MUSTER_DATABASE_SILENCE_S",
        minimum=1,
    )
    database_upkeep_threads: int = bound(4, "threads", "Further work of the process itself waits for a thread.")
    database_statement_s: float = bound(
        30.0, "s", "The server ends a statement of upkeep, or at `database_silence_s` if that is longer."
    )
    database_least_connect_s: int = bound(2, "s", "Less is never given to libpq for a connection.")
    # Hints through Valkey
    hint_send_s: float = bound(1.0, "s", "A hint that is not sent by then is dropped; rows are read at the next sweep anyway.")
    # Less than supervisors wait for an answer of the control plane.
    hint_read_s: float = bound(1.0, "s", "Valkey counts as unreachable.")
    hint_wait_s: float = bound(10.0, "s", "A listener that heard no hint looks again whether there is one.")
    hint_waiting: int = bound(1000, "hints", "The oldest hint gives way to one more.")
    # Ours have about a hundred.
    hint_bytes: int = bound(1024, "bytes", "A longer message is no hint: it is counted and dropped.")
    hint_log_s: float = bound(10.0, "s", "The log hears of unreadable messages no more often.")
    # TLS of a server's own port
    tls_look_s: float = bound(60.0, "s", "A server looks again whether the files of its certificate have changed.")
    tls_handshake_s: float = bound(10.0, "s", "A connection to the gateway without a TLS handshake by then is closed.")
    # Whoever guesses credentials
    throttle_failures: int = bound(20, "credentials", "After so many wrong ones the next unknown one of an address waits.")
    throttle_retry_s: int = bound(1, "s", "An address that had to wait may try again; the answer is 429 until then.")
    throttle_forget_s: float = bound(60.0, "s", "Failures of an address that are older are forgotten.")
    throttle_addresses: int = bound(10_000, "addresses", "All failures are forgotten when one more address fails.")
    throttle_read_s: float = bound(1.0, "s", "Good credentials are read no more often.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernanceLimits:
    """Operations, approvals, audit and sign-in."""

    # Operations and approvals
    operation_open: int = bound(20, "operations", "A requester with so many open operations gets 429.")
    operation_per_hour: int = bound(60, "operations", "A requester who asked for so many within an hour gets 429.")
    operation_reason_chars: int = bound(1_000, "characters", "A longer reason for an operation is refused.")
    operation_ahead_s: float = bound(30 * 86_400.0, "s", "An operation whose window begins later is refused.")
    operation_uses: int = bound(1_000, "uses", "A standing approval for more uses is refused.")
    decision_comment_chars: int = bound(500, "characters", "A longer comment on a decision is cut.")
    freeze_reason_chars: int = bound(300, "characters", "A longer reason for a freeze is cut.")
    approval_warning_percent: int = bound(50, "%", "Approvers are reminded when so much of the time to decide has passed.")
    approval_last_warning_percent: int = bound(90, "%", "Approvers are reminded for the last time then.")
    review_s: float = bound(86_400.0, "s", "Approvers are reminded of a break-glass operation that nobody reviewed.")
    sweep_batch: int = bound(100, "operations", "Further operations wait for the next sweep.")
    policy_life_s: float = bound(730 * 86_400.0, "s", "A policy that names no end expires.")

    # Runs of operations on nodes
    run_lease_s: float = bound(10.0, "s", "A run that somebody took and did not move on is due again.")
    # Whoever holds the socket of its node asks that.
    run_look_again_s: float = bound(300.0, "s", "A dispatched run is looked at again, only to give it up.")
    run_silence_s: float = bound(
        86_400.0, "s", "A node that is silent so long after the window is given up; its run is resolved."
    )
    run_pause_max_s: float = bound(30.0, "s", "The pause before a run is sent again grows no longer.")
    run_retry_s: float = bound(5.0, "s", "A run that cannot be dispatched at the moment is tried again.")
    run_message_chars: int = bound(500, "characters", "A longer message of a run is cut.")
    op_token_s: int = bound(300, "s", "The node refuses an op token that is older.")
    # Nodes refuse a fence that is a week ahead of their clock.
    fence_ahead_ms: int = bound(86_400_000, "ms", "A fence that is further ahead of the clock is logged as a wrong clock.")
    receipt_bytes: int = bound(16_384, "bytes", "A longer receipt is not shown.")

    # Pages and the REST API of operations
    page_rows: int = bound(100, "operations", "A page of operations shows no further ones.")
    page_recent_s: float = bound(2 * 86_400.0, "s", "An operation that was decided earlier leaves the first page.")
    history_rows: int = bound(50, "operations", "Further operations are on the next page of the history.")
    named_people: int = bound(8, "people", "A rule of the policy counts more people instead of naming them.")
    page_lines: int = bound(6, "lines", "The page of an operation folds further lines of what changes.")
    missed_rows: int = bound(8, "rows", "The first page names no further ones of each thing that a person missed.")
    missed_first_s: float = bound(7 * 86_400.0, "s", "A person who marked nothing as seen is told of so long.")
    missed_most_s: float = bound(30 * 86_400.0, "s", "What is older is in the history alone, also for who was away for longer.")
    api_body_bytes: int = bound(MIB, "bytes", "A longer body gets 413 `body_too_large`.")
    api_page_rows: int = bound(50, "operations", "A list that names no limit returns so many.")
    api_page_max_rows: int = bound(200, "operations", "A greater limit of a list is refused.")
    api_integer: int = bound(2**31 - 1, "", "A greater version of a policy is refused: it is the largest of a column.")
    api_id: int = bound(2**63 - 1, "", "A greater id is refused: it is the largest of a column.")
    idempotency_key_chars: int = bound(120, "characters", "A longer `Idempotency-Key` is refused.")
    # Each looks at the rows every few seconds.
    stream_max: int = bound(32, "streams", "A further stream of one process gets 503.")
    stream_poll_s: float = bound(2.0, "s", "A stream looks at its operation, with a hint or without.")
    stream_pause_s: float = bound(0.25, "s", "A stream looks again, in a storm of hints too.")
    stream_heartbeat_s: float = bound(10.0, "s", "A stream that had nothing to say sends a comment.")
    stream_look_s: float = bound(10.0, "s", "A stream whose look takes longer is cut; its client comes back.")
    stream_layer_s: float = bound(2.0, "s", "A stream gives up on hints, and only polls.")

    # Audit
    # Nothing is ever removed from the log.
    audit_events_per_hour: int = bound(20, "events", "Further events of one action by one node are not written.")
    # A stolen node may sign whatever it likes.
    audit_alarms_per_hour: int = bound(10, "events", "Further alarms of one witness are not written.")
    audit_tail_entries: int = bound(1_000, "entries", "A page checks no more of the end of the log while somebody waits.")
    audit_read_rows: int = bound(2_000, "rows", "A reader of the whole log fetches so many at once.")
    checkpoint_entries: int = bound(1_000, "entries", "With so many new entries a checkpoint is due.")
    checkpoint_age_s: float = bound(300.0, "s", "With any new entry a checkpoint is due when the last one is so old.")

    # Sign-in, people and their keys
    session_idle_s: int = bound(30 * 60, "s", "A person who did nothing for so long is signed out.")
    session_max_s: int = bound(12 * 3600, "s", "A person who signed in so long ago is signed out.")
    oidc_session_s: int = bound(
        8 * 3600, "s", "A person who signed in by single sign-on so long ago does it again; groups are read anew.",
        setting="MUSTER_OIDC_SESSION_S", minimum=300,
    )  # fmt: skip
    oidc_timeout_s: float = bound(5.0, "s", "An issuer of single sign-on that is silent so long counts as away.")
    oidc_config_s: float = bound(300.0, "s", "What an issuer says of its addresses is asked for again.")
    oidc_sub_chars: int = bound(190, "characters", "An account with a longer `sub` is refused.")
    oidc_leeway_s: int = bound(60, "s", "A token of an issuer whose clock is further off is refused.")
    session_seen_s: int = bound(60, "s", "That a person did something is stored again.")
    challenge_s: int = bound(300, "s", "An answer to an older challenge of a passkey is refused.")
    sign_in_forget_s: float = bound(3_600.0, "s", "Wrong tries that are older no longer count.")
    sign_in_known_s: float = bound(30 * 86_400.0, "s", "An address from which a name signed in no longer counts as one of it.")
    sign_in_body_bytes: int = bound(64 * 1024, "bytes", "A longer answer of a sign-in script is refused.")
    proof_body_bytes: int = bound(16 * 1024, "bytes", "A longer proof of a decision is refused.")
    invitation_max_hours: int = bound(24 * 14, "h", "An invitation with a longer life is refused.")
    passkey_ms: int = bound(120_000, "ms", "The browser gives up to ask for a passkey.")
    passkey_decision_ms: int = bound(300_000, "ms", "The browser gives up to ask for the passkey of a decision.")
    passkey_id_chars: int = bound(300, "characters", "A passkey with a longer id is refused.")
    # The clock of a telephone may be wrong.
    one_time_password_steps: int = bound(1, "steps", "A code that is off by more steps of 30 s is refused.")
    key_label_chars: int = bound(80, "characters", "A longer name of an approver's key is refused.")
    shown_digest_chars: int = bound(12, "characters", "A longer digest in the audit list is cut.")
    token_name_chars: int = bound(80, "characters", "A longer name of an admin token is refused.")
    token_use_s: float = bound(60.0, "s", "The use of an admin token is stored again.")

    # Alerts
    alert_away_s: float = bound(60.0, "s", "A problem that was not seen for so long has ended.")
    alert_told_after_s: float = bound(30.0, "s", "A problem that ends sooner is told to nobody.")
    alert_storm: int = bound(10, "messages", "Further alerts of `alert_storm_s` are told in one message.")
    alert_storm_s: float = bound(
        60.0, "s", "No more than `alert_storm` messages about alerts go out in this time, and a summary."
    )
    alert_open: int = bound(2_000, "alerts", "Further problems, the least urgent ones, are not stored, and the log says so.")
    alert_kept_s: float = bound(
        90 * 86_400.0,
        "s",
        "Alerts that ended longer ago are deleted.",
        setting="MUSTER_ALERT_RETENTION_DAYS",
        minimum=1,
        factor=86_400,
    )
    alert_rows: int = bound(100_000, "alerts", "Of more alerts that ended the oldest ones are deleted.")
    alert_batch: int = bound(1_000, "alerts", "One look deletes no more.")
    alert_silences: int = bound(1_000, "silences", "A further silence of a kind and object is refused.")
    alert_silence_s: float = bound(90 * 86_400.0, "s", "A silence that ends later is refused.")
    alert_reason_chars: int = bound(300, "characters", "A longer reason for a silence is refused.")
    alert_named: int = bound(10, "alerts", "A message about many alerts names no more.")
    alert_late_s: float = bound(60.0, "s", "Pages say since when nobody looked for problems.")

    # Notices
    notice_overdue_s: float = bound(30.0, "s", "The control plane itself sends what no worker has sent by then.")
    notice_budget_s: float = bound(30.0, "s", "A round of deliveries begins no further one.")
    # One attempt takes less.
    notice_lease_s: float = bound(60.0, "s", "A notice that somebody claimed and did not finish goes to the next.")
    notice_pause_s: float = bound(30.0, "s", "A notice that failed is tried again; each further pause is twice as long.")
    notice_pause_max_s: float = bound(3_600.0, "s", "The pause between two tries grows no longer.")
    notice_give_up_s: float = bound(86_400.0, "s", "A notice that is so old is given up, and the log says so.")
    notice_error_chars: int = bound(300, "characters", "A longer error of a delivery is cut.")
    notice_unreadable_s: float = bound(3_600.0, "s", "Approvers are told of further messages that workers set aside.")
    token_days: int = bound(3_650, "days", "An admin token that lives longer is refused.")
    webhook_name_chars: int = bound(80, "characters", "A longer name of a webhook is refused.")
    webhook_url_chars: int = bound(300, "characters", "A longer URL of a webhook is refused.")
    webhook_attempts: int = bound(3, "attempts", "A webhook that takes a message in none of these is shown as a problem.")
    webhook_answer_chars: int = bound(300, "characters", "No more of the answer to a test is shown.")
    # What these services take: Slack 3,000 in a section, Discord 256 and 4,096, Teams 28 KB in all, ntfy 4,096 bytes.
    slack_chars: int = bound(2_000, "characters", "A longer text is cut in a message for Slack.")
    discord_title_chars: int = bound(256, "characters", "A longer title is cut in a message for Discord.")
    discord_chars: int = bound(4_000, "characters", "A longer text is cut in a message for Discord.")
    teams_chars: int = bound(8_000, "characters", "A longer text is cut in a message for Microsoft Teams.")
    ntfy_bytes: int = bound(3_500, "bytes", "A longer text is cut in a message for ntfy.")
    webhook_s: float = bound(10.0, "s", "A webhook that does not answer by then has failed.")
    webhook_lookup_s: float = bound(3.0, "s", "A webhook whose name is not resolved by then has failed.")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLimits:
    """Links to nodes, what nodes report, and commands to them."""

    # Signs of life, drains, rivals and clocks
    heartbeat_interval_s: float = bound(
        5.0,
        "s",
        "A node that reports over REST is told to report this often.",
        setting="MUSTER_HEARTBEAT_INTERVAL_S",
        minimum=0.1,
    )
    stale_after_s: float = bound(
        10.0, "s", "A node that said nothing for so long gets no new request.", setting="MUSTER_STALE_AFTER_S", minimum=0.1
    )
    offline_after_s: float = bound(
        15.0, "s", "A node that said nothing for so long is offline.", setting="MUSTER_OFFLINE_AFTER_S", minimum=0.1
    )
    bridge_ping_interval_s: float = bound(
        15.0,
        "s",
        "A bridge v1 worker is pinged.",
        setting="MUSTER_BRIDGE_PING_INTERVAL_S",
        minimum=0.1,
    )
    bridge_pong_window_s: float = bound(
        45.0,
        "s",
        "A bridge v1 worker that answered no ping for so long is offline.",
        setting="MUSTER_BRIDGE_PONG_WINDOW_S",
        minimum=0.1,
    )
    # ModelRelay's worker answers with all that its backend lists, whatever it was started with; and where the backend does not
    # answer, its session ends with all that runs there.
    bridge_refresh_s: float = bound(
        0.0,
        "s",
        "An idle bridge v1 worker is asked what its backend lists, which replaces its models; 0 = only one that "
        "could not find out.",
        setting="MUSTER_BRIDGE_REFRESH_S",
    )
    agent_heartbeat_s: float = bound(
        15.0, "s", "An agent is told to report this often.", setting="MUSTER_AGENT_HEARTBEAT_S", minimum=0.1
    )
    agent_late_s: float = bound(
        2.0, "s", "A heartbeat of an agent counts as missed this long after it was due: a network is not punctual."
    )
    heartbeat_order_s: float = bound(
        60.0, "s", "A heartbeat that was said so much before the last one counts as said after it: a clock was set back."
    )
    agent_ramp_s: float = bound(
        60.0,
        "s",
        "A node of an agent that came back gets all its requests at once; until then one, and twice as many after each answer.",
        setting="MUSTER_AGENT_RAMP_S",
    )
    jwt_leeway_s: float = bound(10.0, "s", "A JWT of an agent counts so long beyond its exp: clocks differ.")
    jwks_s: float = bound(60.0, "s", "The keys of MUSTER_AGENT_JWKS are read no more often.")
    agent_poll_s: float = bound(20.0, "s", "A heartbeat over HTTP that asks to wait for a command is answered without one.")
    agent_look_s: float = bound(0.5, "s", "A heartbeat over HTTP that asks to wait no longer is answered without a command.")
    agent_message_bytes: int = bound(1024 * 1024, "bytes", "A longer message of an agent ends its session.")
    agent_sessions: int = bound(10_000, "sessions", "One more agent of this gateway is refused a socket.")
    reclaim_grace_s: float = bound(
        15.0, "s", "Requests that still run on a reclaimed node are ended.", setting="MUSTER_RECLAIM_GRACE_S"
    )
    drain_timeout_s: float = bound(
        120.0,
        "s",
        "Requests that still run on a draining node are ended; a drain may name its own time.",
        setting="MUSTER_DRAIN_TIMEOUT_S",
    )
    drain_timeout_max_s: float = bound(86_400.0, "s", "A drain that asks for a longer time is refused.")
    # A gateway that looks late still finds it.
    drain_deadline_kept_s: float = bound(30.0, "s", "The sweep forgets the deadline of a drain so long after it.")
    drain_reason_chars: int = bound(200, "characters", "A longer reason for a drain or a cordon is refused.")
    # Nodes get the same time to write theirs afterwards.
    rows_blind_s: float = bound(6.0, "s", "Without rows for so long a gateway believes no age of a heartbeat.")
    named_in_metrics: int = bound(256, "nodes", "Further nodes share the series named `others`.")
    rival_heard_s: float = bound(15.0, "s", "What another gateway heard of a node counts no longer.")
    rival_audit_s: float = bound(3_600.0, "s", "A further rival of a node within it makes no audit entry.")
    rival_shown_s: float = bound(86_400.0, "s", "Pages no longer show that another runner asked for the node.")
    # It would be taken for a new one.
    former_instances: int = bound(16, "instances", "The oldest instance of a node is forgotten.")
    # Tokens are judged by it.
    clock_skew_warning_ms: int = bound(60_000, "ms", "A node whose clock is further off is shown as a problem.")
    # It would refuse a token, which lives for five minutes.
    clock_skew_ms: int = bound(240_000, "ms", "A node whose clock is further off is sent no operation.")
    clock_skew_shown_ms: int = bound(1_000, "ms", "A node whose clock moved by less since it registered keeps the skew shown.")

    # Sockets of nodes
    handshake_timeout_s: float = bound(10.0, "s", "A socket that did not register is closed.")
    max_message_bytes: int = bound(64 * MIB, "bytes", "A longer frame of a node closes its socket with 1009.")
    max_models: int = bound(256, "models", "Further models of a node are dropped.")
    max_name_chars: int = bound(120, "characters", "A longer name of a node is cut.")
    max_model_name_chars: int = bound(200, "characters", "A model with a longer name is dropped.")
    max_concurrent_cap: int = bound(1_024, "requests", "A node that says it can run more gets so many at once.")
    auth_failures: int = bound(
        3,
        "failures",
        "An address with so many wrong secrets waits `MUSTER_WORKER_AUTH_BLOCK_S`.",
        setting="MUSTER_WORKER_AUTH_FAILURES",
        minimum=1,
    )
    auth_block_s: float = bound(0.25, "s", "An address that was blocked may try again.", setting="MUSTER_WORKER_AUTH_BLOCK_S")
    max_unregistered: int = bound(64, "sockets", "Further sockets of one address that did not register need a good credential.")
    registered_at_once: int = bound(128, "nodes", "Further nodes that register at once wait for the next transaction.")
    socket_buffer_bytes: int = bound(256 * MIB, "bytes", "A node whose line has so much waiting is disconnected with 1011.")
    # Recordings are large, and some lines are slow.
    socket_full_bytes: int = bound(32 * MIB, "bytes", "A node whose line has so much waiting gets no new request.")
    socket_write_s: float = bound(15.0, "s", "A node that takes no byte for so long is disconnected with 1011.")
    socket_close_s: float = bound(2.0, "s", "A gateway that stops ends what it still writes about its nodes.")
    control_frame_chars: int = bound(2 * MIB, "characters", "A longer text frame closes its muster v1 session with 1002.")
    # It may turn out to be an error even then.
    bridge_held_chars: int = bound(64 * 1024, "characters", "The beginning of a bridge v1 answer is passed on.")
    # A late frame of it is then a protocol error.
    bridge_forgotten_streams: int = bound(4_096, "streams", "The oldest stream that is over is forgotten.")

    # The log of a node, which somebody asks for
    log_lines: int = bound(600, "lines", "Of what a node tells of its log, older lines are dropped.")
    log_line_chars: int = bound(400, "characters", "A longer line of a node's log is cut.")
    log_ask_s: float = bound(2.0, "s", "A further question for the log of a node within it is not asked again.")
    log_answer_s: float = bound(15.0, "s", "A node that did not answer a question for its log is no longer waited for.")
    hub_text_chars: int = bound(100, "characters", "A longer text is not looked for at a node's hub.")
    hub_models: int = bound(20, "models", "Further models that a node finds at its hub are dropped.")
    hub_files: int = bound(24, "files", "Further GGUF files of a repository that a node finds are dropped.")
    hub_answer_s: float = bound(25.0, "s", "A node that found nothing out about its hub is no longer waited for.")
    log_kept_s: float = bound(600.0, "s", "What a node told of its log is deleted.")

    # Links that gateways open over HTTP
    http_head_bytes: int = bound(64 * 1024, "bytes", "A longer head of an answer ends the attempt as an error of the node.")
    http_kept_heads: int = bound(4, "heads", "The oldest head of a node's answers is forgotten; llhttp reads it again.")
    http_kept_head_bytes: int = bound(2048, "bytes", "A longer head of a node's answers is not remembered.")
    http_refusal_bytes: int = bound(16 * 1024, "bytes", "A longer body of a refusal is not read for its error code.")
    http_tenant_chars: int = bound(128, "characters", "A longer name of a tenant is cut and ends in a part of its hash.")
    full_retry_s: float = bound(5.0, "s", "A full node that names no time is asked again.")
    full_retry_max_s: float = bound(60.0, "s", "A full node that names a later time is asked again.")
    unspoken_s: float = bound(600.0, "s", "An endpoint that a node said it does not answer is tried there again.")

    # Ejection of replicas that fail or are slow
    ejection_base_s: float = bound(10.0, "s", "The first ejection of a replica ends; each further one lasts twice as long.")
    ejection_max_s: float = bound(300.0, "s", "An ejection lasts no longer; after so long without one the next is a first one.")
    ejection_answers: int = bound(16, "answers", "The oldest answer of a replica is forgotten.")
    ejection_memory_s: float = bound(600.0, "s", "An older answer of a replica no longer counts.")
    # So many good answers make a mean, too.
    ejection_faults: int = bound(5, "answers", "With so many, and half of its answers, a replica may be ejected.")
    ejection_fewer: int = bound(
        8, "times", "Only if the better half of the others fails so much more rarely, a replica is ejected."
    )
    ejection_probes: int = bound(3, "answers", "After so many good answers to probes a replica is back.")
    # GPUs that people own differ.
    ejection_slow_factor: float = bound(8.0, "times", "An answer that takes so many times what the other nodes take is slow.")
    ejection_slow_s: float = bound(1.0, "s", "An answer that takes no longer is never slow.")
    ejection_slow_s_per_byte: float = bound(0.001, "s", "A stream that needs no more for a byte is never slow.")
    figure_answers: int = bound(8, "answers", "With fewer a replica counts as an average one of its model.")
    figure_kept: float = bound(0.99, "part", "An answer counts so much less for each hour of its age.")
    ejection_mean_weight: float = bound(0.2, "part", "The newest answer counts so much in the moving mean of a replica.")
    ejection_probe_pause_s: float = bound(1.0, "s", "A replica on trial gets its next probe.")
    # A further ejection is news again then.
    ejection_forget_s: float = bound(3_600.0, "s", "What is known of a replica that gets no request is forgotten.")
    ejection_links: int = bound(10, "links", "A node that linked so often within `ejection_links_s` is ejected as unsteady.")
    ejection_links_s: float = bound(60.0, "s", "An older link of a node no longer counts against it.")
    ejection_shown_s: float = bound(300.0, "s", "An ejection that is over is no longer shown as being tried.")

    # Pages
    page_nodes: int = bound(50, "nodes", "Further nodes are on the next page of the list.")
    page_events: int = bound(50, "events", "Older events of a node are on the next page.")
    page_chips: int = bound(3, "models", "Further models of a node are counted in the list.")
    bulk_nodes: int = bound(200, "nodes", "A change of more nodes at once is refused.")
    # A node that comes back enrols anew.
    dead_node_s: float = bound(
        30 * 86_400.0,
        "s",
        "A node that was not heard for so long is removed; its requests keep its name.",
        setting="MUSTER_NODE_RETENTION_DAYS",
        minimum=1,
        factor=86_400,
    )

    # GPUs: one row each, written by the sweep
    gpu_refresh_s: float = bound(9.0, "s", "A GPU that was reported is written again.")
    gpu_batch: int = bound(1_000, "nodes", "The GPUs of further nodes are written with the next statement.")
    gpu_gone_s: float = bound(30 * 86_400.0, "s", "A GPU that its node no longer names is forgotten.")
    # A node that gives its GPUs other names each time.
    gpu_gone_per_node: int = bound(64, "GPUs", "Of further GPUs that a node no longer names the oldest are forgotten.")
    gpu_page_rows: int = bound(1_000, "GPUs", "A list holds no more; a greater limit is refused.")
    gpu_page_default_rows: int = bound(200, "GPUs", "A list that names no limit returns so many.")

    # History of GPUs: samples, their means of each minute, and those of ten
    history_sample_s: float = bound(10.0, "s", "A GPU gets its next sample.")
    history_heard_s: float = bound(30.0, "s", "A GPU that was not reported for longer gets no sample.")
    history_samples_s: float = bound(2 * 3_600.0, "s", "Older samples of GPUs are deleted.")
    history_minutes_s: float = bound(2 * 86_400.0, "s", "Older minutes of GPUs are deleted.")
    history_tens_s: float = bound(30 * 86_400.0, "s", "What is older still of the history of GPUs is deleted.")

    # Figures of nodes, worked out of request records
    figures_hour: float = bound(0.99, "part", "What happened an hour ago counts so much, and so on.")
    figures_step: float = bound(1.1, "times", "Durations and rates within so much of each other count as one.")
    figures_smallest: float = bound(0.1, "ms or tokens/s", "What is less counts as this.")
    figures_buckets: int = bound(200, "buckets", "What is more than the last of the buckets holds counts as that.")
    figures_least: float = bound(0.001, "requests", "A bucket or row that older requests left with less is forgotten.")
    figures_settled: float = bound(1.0, "requests", "With fewer of them the fleet's median stands for a time or a rate.")
    figures_lag_s: float = bound(10.0, "s", "Requests that ended later are left to the next round: some are not written yet.")
    figures_back_s: float = bound(3 * 3_600.0, "s", "The first round begins with requests that ended so long ago.")
    figures_longest_s: float = bound(
        900.0, "s", "A request that took longer, and longer than MUSTER_REQUEST_TIMEOUT_S, is in no figure."
    )
    figures_batch: int = bound(5_000, "requests", "Further requests are counted in the next batch.")
    figures_budget_s: float = bound(20.0, "s", "A round begins no further batch.")
    uptime_s: float = bound(86_400.0, "s", "The uptime of a node is its share of so long.")

    # What a node may say of itself: text is cut, numbers are brought into their range, what is beyond a count is dropped
    report_gpus: int = bound(32, "GPUs", "Further GPUs are dropped.")
    report_replicas: int = bound(256, "replicas", "Further replicas are dropped.")
    report_available: int = bound(512, "models", "Further models that could be loaded are dropped.")
    report_endpoints: int = bound(32, "endpoints", "Further endpoints of a replica are dropped.")
    report_models: int = bound(32, "models", "Further models of a memory report are dropped.")
    report_constraints: int = bound(32, "members", "Further fields of a load, limits of a field, words of a limit are dropped.")
    # An engine with twenty fields has a fifth of it.
    report_constraints_bytes: int = bound(16_384, "bytes", "Longer constraints of a model are dropped.")
    report_name_chars: int = bound(200, "characters", "A longer name is cut.")
    report_word_chars: int = bound(40, "characters", "A longer word is cut.")
    report_detail_chars: int = bound(300, "characters", "A longer detail of a replica is cut.")
    report_error_chars: int = bound(500, "characters", "A longer error is cut.")
    report_limit_chars: int = bound(200, "characters", "A longer limit of a field of a load is cut.")
    report_path_chars: int = bound(100, "characters", "An endpoint with a longer path is dropped.")
    report_load: int = bound(1_000_000, "requests", "A greater count of requests or replicas is brought down to it.")
    report_mb: int = bound(2**25, "MiB", "A larger memory is brought down to it: the sum over all GPUs still fits the column.")
    report_context_tokens: int = bound(10**9, "tokens", "A longer context is brought down to it.")
    report_duration_ms: int = bound(10**9, "ms", "A longer duration is brought down to it.")
    report_eta_s: float = bound(1e6, "s", "A later estimate is brought down to it.")
    report_unix_ms: int = bound(10**15, "ms", "A later point in time is brought down to it.")
    report_clock_ms: int = bound(2**47, "ms", "A node whose clock is later counts as having this time.")
    report_temperature_c: float = bound(1_000.0, "°C", "A higher temperature is brought down to it.")
    report_power_w: float = bound(100_000.0, "W", "A higher power is brought down to it.")
    # It is the largest of a column.
    report_integer: int = bound(2**31 - 1, "", "A greater number is brought down to it, or refused where an operator gives it.")
    report_exact_integer: int = bound(2**53 - 1, "", "A greater number is brought down to it: beyond it browsers round.")
    status_stage_chars: int = bound(200, "characters", "A longer stage of a run is cut.")
    status_code_chars: int = bound(80, "characters", "A longer error code of a run is cut.")
    status_message_chars: int = bound(500, "characters", "A longer message of a run is cut.")
    status_result_bytes: int = bound(64 * 1024, "bytes", "A longer result of a run is dropped, and the run says so.")
    status_receipt_chars: int = bound(8 * 1024, "characters", "A longer receipt is dropped.")
    witness_note_chars: int = bound(8 * 1024, "characters", "A longer note of a witness is dropped.")
    witness_alarm_chars: int = bound(300, "characters", "A longer alarm of a witness, or error of a policy, is cut.")
    op_id_chars: int = bound(64, "characters", "A longer id of an operation or a key is dropped.")
    runner_id_chars: int = bound(200, "characters", "A longer runner id is dropped.")
    public_key_chars: int = bound(400, "characters", "A longer public key is dropped.")
    op_key_chars: int = bound(128, "characters", "A longer key or signature is dropped.")
    digest_chars: int = bound(64, "characters", "A longer digest is dropped.")
    op_keys: int = bound(8, "keys", "All but the newest op keys of a node are dropped.")
    retired_op_keys: int = bound(16, "keys", "Older retired keys of a node are deleted: they sign nothing any more.")
    op_key_bytes: int = bound(64, "bytes", "A longer key that an operator gives for a node is refused.")
    op_key_id_chars: int = bound(64, "characters", "A longer id of a key that an operator gives is refused.")

    # Credentials and names
    credential_name_chars: int = bound(80, "characters", "A longer name of a credential is refused.")
    setup_code_s: int = bound(3600, "s", "A setup code that nobody used, and what follows its node on `/setup`, ends.")
    setup_code_chars: int = bound(20, "characters", "A longer setup code is cut.")
    setup_form_bytes: int = bound(4_096, "bytes", "A longer form of `/setup` is refused.")
    setup_fields: int = bound(20, "fields", "A form or address of `/setup` with more is refused.")
    setup_nodes: int = bound(20, "nodes", "The page that adds nodes shows no more of those with one credential.")
    provider_wait_s: int = bound(3_600, "s", "A provider whose requests are to wait longer is refused.")
    credential_nodes: int = bound(10_000, "nodes", "A credential for more nodes is refused.")
    credential_use_s: float = bound(60.0, "s", "The use of a credential is stored again.")
    name_tries: int = bound(64, "names", "An enrolment whose name so many live workers have is refused.")

    # Nodes that are called at their URL
    url_chars: int = bound(300, "characters", "A longer URL of a node is refused.")
    lookup_s: float = bound(3.0, "s", "A URL whose name is not resolved by then cannot be reached.")
    api_key_chars: int = bound(512, "characters", "A longer API key of a node is refused.")
    # In contract v1 a node answers one at a time.
    direct_concurrency: int = bound(1, "requests", "An agent that says nothing of it gets so many at once.")
    probe_s: float = bound(3.0, "s", "A node that did not answer a probe cannot be reached.")
    probe_answered_s: float = bound(29.0, "s", "A node that answered its probe is probed again.")
    probe_silent_s: float = bound(4.0, "s", "A node that did not answer its probe, or tells its capabilities, is probed again.")
    probe_answer_bytes: int = bound(MIB, "bytes", "A longer answer to a probe counts as none.")
    probe_error_chars: int = bound(300, "characters", "A longer error of a probe is cut.")
    probe_batch: int = bound(100, "nodes", "Further nodes that are due wait for the next round of probes.")
    probe_threads: int = bound(16, "nodes", "Further nodes of a round of probes wait for a thread.")

    # Commands to nodes
    channel_sweep_s: float = bound(4.0, "s", "Gateways look for commands to their nodes, with a hint or without.")
    # A storm of hints costs ten looks a second at most, and a single one is followed at once.
    channel_hint_pause_s: float = bound(0.1, "s", "Hints are followed again.")
    channel_policy_s: float = bound(30.0, "s", "Gateways look which nodes hold an old policy.")
    channel_checkpoint_s: float = bound(10.0, "s", "Gateways look which nodes have not seen the newest audit checkpoint.")
    channel_progress_s: float = bound(1.0, "s", "The progress of a run is stored again.")
    channel_retry_s: float = bound(1.0, "s", "A round that the database failed is tried again.")
    # It is asked about them again.
    channel_statuses_per_node: int = bound(64, "operations", "What a node says of further operations is dropped.")
    channel_statuses: int = bound(256, "operations", "What nodes said of further operations waits for the next round.")
    # The node says it again when it registers.
    channel_reports_per_node: int = bound(8, "reports", "Further reports of a node that wait are dropped.")
    channel_proofs: int = bound(8, "proofs", "Nodes that need a further consistency proof wait for the next round.")
    # A policy has up to 64 KiB.
    channel_policies: int = bound(16, "policies", "A node that is further behind says so again and gets the next ones.")
    # Tickets. Every gateway has read a new key, and told its nodes, well before it signs.
    ticket_settle_s: float = bound(60.0, "s", "A new ticket key signs; until then the one before it does.")
    ticket_overlap_s: float = bound(600.0, "s", "A ticket key that was replaced verifies no more.")
    ticket_key_s: float = bound(
        90 * 86_400.0,
        "s",
        "A ticket key is replaced.",
        setting="MUSTER_TICKET_KEY_DAYS",
        minimum=1,
        factor=86_400,
    )
    # The node says it again.
    ticket_reports_per_node: int = bound(200, "reports", "Further reports of a node on tickets are dropped.")
    ticket_key_kept_s: float = bound(7 * 86_400.0, "s", "The row of a ticket key that was replaced is deleted.")
    # Certificates of the internal CA. Nodes renew them when a third of the time is left.
    certificate_s: float = bound(
        30 * 86_400.0,
        "s",
        "A node's certificate of the internal CA expires.",
        setting="MUSTER_NODE_CERTIFICATE_DAYS",
        minimum=1,
        factor=86_400,
    )
    certificate_backdate_s: float = bound(3600.0, "s", "A clock that is further behind takes a new certificate for invalid.")
    certificate_gap_s: float = bound(20.0, "s", "A node's next request for a certificate is looked at.")
    csr_chars: int = bound(8 * 1024, "characters", "A longer certificate request is refused.")
    authority_s: float = bound(3650 * 86_400.0, "s", "An internal CA expires.")
    authority_settle_s: float = bound(7 * 86_400.0, "s", "A new internal CA gives certificates; clients have it by then.")
    command_quiet_s: float = bound(5.0, "s", "A node that was given a command and says nothing is asked about it.")
    # It could expire on the way.
    command_token_margin_s: float = bound(5.0, "s", "An op token that holds no longer is not sent; the run gets a new one.")
    command_batch: int = bound(500, "commands", "Further open commands wait for the next look.")
    # An earlier answer may be about the token before.
    command_unheard_s: float = bound(2.0, "s", "A node that says it never heard of a command is believed.")
    command_away_retry_s: float = bound(10.0, "s", "An operation for a node that is away is tried again.")
    call_poll_s: float = bound(1.0, "s", "A node that is called at its URL is asked again how its load goes.")
    call_s: float = bound(10.0, "s", "A call that is not answered has failed; after twice as long its task counts as lost.")
    call_unattended_s: float = bound(5.0, "s", "A command that nobody touched for so long has lost its task and gets another.")
    call_answer_bytes: int = bound(256 * 1024, "bytes", "A call with a longer answer has failed.")
    call_batch: int = bound(100, "commands", "Further commands without a task wait for the next look.")
    call_task_s: int = bound(30, "s", "A worker drops a task for a call that waited longer; the next look makes another.")

    # Operations on nodes, and their pages
    operation_targets: int = bound(64, "nodes", "An operation for more nodes is refused.")
    operation_text_chars: int = bound(200, "characters", "A longer text parameter is refused.")
    operation_overrides: int = bound(64, "members", "A parameter object with more members is refused.")
    offered_models: int = bound(200, "models", "Further models are not in the list of the form; their names are typed.")
    listed_names: int = bound(3, "names", "Further names in a sentence are counted instead.")
    shown_models: int = bound(40, "models", "Further models that a node could load are counted instead.")
    reload_failed_again_s: float = bound(600.0, "s", "A node that names another moment in each report makes a further notice.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits:
    """Requests: their admission, queue, relay, records and dialects."""

    # What an operator sets: the life of a request
    queue_s: float = bound(
        30.0, "s", "A request that still waits ends with 504 `REQUEST_TIMEOUT`.", setting="MUSTER_QUEUE_TIMEOUT_S"
    )
    request_s: float = bound(
        300.0, "s", "A request ends, from acceptance to the last byte.", setting="MUSTER_REQUEST_TIMEOUT_S"
    )
    canary_interval_s: float = bound(
        300.0,
        "s",
        "A node is asked the next [canary question](operate.md#canary-questions) of a model, on average.",
        setting="MUSTER_CANARY_INTERVAL_S",
        minimum=1,
    )
    no_node_wait_s: float = bound(
        9.0, "s", "A request whose model no node serves ends with 503.", setting="MUSTER_NO_NODE_WAIT_S"
    )
    # Above the wait for a node, whose end is better said with a status.
    stream_ping_s: float = bound(
        9.5,
        "s",
        "A silent stream gets a comment (or a `ping` of Messages); later errors are events.",
        setting="MUSTER_STREAM_PING_S",
    )
    accept_s: float = bound(
        5.0, "s", "A request that the database did not record is refused with 503.", setting="MUSTER_ACCEPT_TIMEOUT_S"
    )
    client_write_s: float = bound(
        30.0, "s", "A client that takes nothing for this long is closed.", setting="MUSTER_CLIENT_WRITE_TIMEOUT_S"
    )
    header_s: float = bound(
        10.0,
        "s",
        "A client that has not sent its headers gets 408.",
        setting="MUSTER_HEADER_TIMEOUT_S",
    )
    body_s: float = bound(60.0, "s", "A client that has not sent its body gets 408.", setting="MUSTER_BODY_TIMEOUT_S")
    shutdown_grace_s: float = bound(
        30.0, "s", "A stopping gateway ends streams that still run.", setting="MUSTER_SHUTDOWN_GRACE_S"
    )
    ticket_s: float = bound(
        5.0, "s", "A request with a ticket has to have begun on the node.", setting="MUSTER_TICKET_S", minimum=1
    )
    ticket_unused_s: float = bound(120.0, "s", "A ticket of which no node says that it was used ends as cancelled.")
    ticket_report_s: float = bound(
        600.0,
        "s",
        "A request with a ticket of which no node says how it ended is interrupted so long after its time.",
    )
    ticket_look_s: float = bound(0.5, "s", "Whoever follows a ticket learns of its node's loss.")
    ticket_made_s: float = bound(60.0, "s", "A record is looked for around the moment in its id.")
    ticket_back_s: float = bound(60.0, "s", "After an outage nodes have so long to tell what became of tickets.")
    max_queue: int = bound(
        100,
        "requests",
        "One more waiting request of a model is refused with 503; a model may have its own limit.",
        setting="MUSTER_MAX_QUEUE_LEN",
    )
    max_tenant_queue: int = bound(
        200,
        "requests",
        "One more waiting request of a tenant is refused with 503.",
        setting="MUSTER_MAX_TENANT_QUEUE_LEN",
    )
    provider_span_s: float = bound(86_400.0, "s", "`GET /admin/stats` counts no older requests of a provider.")
    queue_full_log_s: float = bound(1.0, "s", "Requests that find their queue full have no further line in the log within it.")
    # Each node declares at most ``max_models`` at a time, but others every minute if it likes.
    known_models: int = bound(10_000, "models", "Further names that nodes declare are not noted, and the log says so.")
    degrade_wait_s: float = bound(
        30.0,
        "s",
        "A request that would wait longer goes to a fallback.",
        setting="MUSTER_DEGRADE_WAIT_S",
    )
    refuse_wait_s: float = bound(
        60.0,
        "s",
        "A request that would wait longer is refused with 503.",
        setting="MUSTER_REFUSE_WAIT_S",
    )
    starvation_s: float = bound(
        10.0,
        "s",
        "A request that waited so long counts as a tier higher.",
        setting="MUSTER_STARVATION_S",
        minimum=0.1,
    )
    idle_tenants: int = bound(
        1_000, "tenants", "What the tenant that waited longest ago had of the slots is forgotten for one more."
    )
    queue_note_s: float = bound(5.0, "s", "A stream that waits in the queue is told its place again.")
    max_body_bytes: int = bound(
        32 * MIB, "bytes", "A larger request body is refused with 413.", setting="MUSTER_MAX_BODY_BYTES", minimum=1024
    )
    max_audio_bytes: int = bound(
        64 * MIB,
        "bytes",
        "A larger request body with a recording is refused with 413.",
        setting="MUSTER_MAX_AUDIO_MB",
        minimum=1,
        factor=MIB,
    )
    max_prompt_chars: int = bound(
        1_000_000,
        "characters",
        "A longer prompt is refused with 400; a model may have its own limit.",
        setting="MUSTER_MAX_PROMPT_CHARS",
        minimum=1,
    )
    max_tokens_cap: int = bound(
        32_768,
        "tokens",
        "A larger `max_tokens` is refused with 400; a model may have its own limit.",
        setting="MUSTER_MAX_TOKENS_CAP",
        minimum=1,
    )
    requests_per_minute: int = bound(
        6_000,
        "requests",
        "One more is refused with 429; a key or its tenant may have its own limit.",
        setting="MUSTER_RATE_LIMIT_RPM",
        minimum=1,
    )
    # JSON numbers that every reader takes exactly; as millionths of a currency nine thousand million.
    budget_amount: int = bound(2**53 - 1, "", "A larger limit or budget of a key or a tenant is refused.")
    # Two of them are less than the two seconds for which a gateway may hold what another one wants.
    budget_round_s: float = bound(
        0.4, "s", "A gateway tells Valkey again what was used of budgets, and gives back what others want."
    )
    budget_hello_s: float = bound(
        2.0, "s", "A gateway that holds nothing of any budget tells Valkey so again, and looks who else reaches Valkey."
    )
    budget_valkey_s: float = bound(0.5, "s", "A round that Valkey did not answer counts as lost; after two PostgreSQL deals.")
    budget_database_s: float = bound(2.0, "s", "A round that PostgreSQL did not answer counts as lost.")
    budget_share_percent: float = bound(
        0.0,
        "%",
        "A gateway takes no larger part of what is free of a budget without a need; 0 = an even one.",
        setting="MUSTER_BUDGET_SHARE_PERCENT",
        minimum=0,
    )
    budget_tries: int = bound(
        3,
        "rounds",
        "A request for which the budget is held by other gateways is refused with 429; after twice as many with 503.",
    )
    budget_waiting: int = bound(1_000, "requests", "One more that waits for a share of a budget is refused with 503.")
    budget_counters: int = bound(500, "counters", "Further ones are told to a new Valkey with another message.")
    budget_idle_s: float = bound(60.0, "s", "A gateway forgets a budget of which nothing is used.")
    budget_kept_s: float = bound(86_400.0, "s", "Valkey forgets a counter so long after its day or month, or its last use.")
    # Half of what an estimate takes: tokens of code and of other scripts are shorter.
    budget_token_chars: int = bound(2, "characters", "A reservation counts one token for so many of a prompt.")
    usage_rows: int = bound(
        10_000, "rows", "A larger list of usage is refused with 400; so many old events are deleted at once."
    )
    # More than a year, so that a month can be compared with that of the year before.
    usage_days: int = bound(400, "days", "Older usage events are deleted, and a list of usage goes over no more.")
    usage_batch: int = bound(500, "events", "A webhook gets the further ones in another batch.")
    usage_batches: int = bound(20, "batches", "A webhook gets the further ones with the next look.")
    tenant_weight: int = bound(10_000, "%", "A larger weight of a tenant is refused.")
    price: int = bound(1_000_000, "", "A higher price of a million tokens, in the currency, is refused.")
    # Where a request goes: the weights of a score, and what ties a request to a node
    score_load: float = bound(0.25, "", "A node scores so much for free slots.", setting="MUSTER_SCORE_LOAD")
    score_active: float = bound(0.25, "", "A node without requests scores so much.", setting="MUSTER_SCORE_ACTIVE")
    score_latency: float = bound(0.20, "", "The fastest node scores so much.", setting="MUSTER_SCORE_LATENCY")
    score_reliability: float = bound(
        0.20, "", "A node that answers every request scores so much.", setting="MUSTER_SCORE_RELIABILITY"
    )
    score_affinity: float = bound(
        0.10,
        "",
        "A node scores so much for affinity; 0 = off.",
        setting="MUSTER_SCORE_AFFINITY",
    )
    score_latency_floor_ms: float = bound(50.0, "ms", "A node that answers faster scores as if it took so long.")
    score_margin: float = bound(0.02, "", "Nodes whose scores differ by no more are equal: the least loaded gets the request.")
    session_s: float = bound(
        300.0, "s", "A session is no longer tied to the node that it used last.", setting="MUSTER_SESSION_AFFINITY_S"
    )
    sessions: int = bound(20_000, "sessions", "The session used longest ago is forgotten for one more.")
    prefix_block_bytes: int = bound(256, "bytes", "A shorter beginning of a prompt is not remembered.")
    prefix_prompt_blocks: int = bound(24, "blocks", "What comes later in a prompt is not compared.")
    # Some 250 bytes each.
    prefix_blocks: int = bound(100_000, "blocks", "The block used longest ago is forgotten for one more.")
    prefill_tokens_s: float = bound(
        2_000.0, "tokens/s", "A node is believed to compute a prompt at this pace, when affinity is weighed against waits."
    )
    decision_candidates: int = bound(
        8,
        "nodes",
        "A record keeps so many of those compared; 0 = none.",
        setting="MUSTER_DECISION_CANDIDATES",
    )
    replayed_records: int = bound(200_000, "records", "Older decisions are not scored anew by `replay_routing`.")
    failover_slots: int = bound(
        64, "slots", "Further requests of nodes that missed two heartbeats have none held on other nodes."
    )
    placed_among: int = bound(8, "nodes", "So many of the nodes of a model, others each time, are compared for a request.")
    max_requeues: int = bound(
        3,
        "nodes",
        "A request that lost one more node ends with 502 or 503.",
        setting="MUSTER_MAX_REQUEUES",
    )
    max_stream_bytes: int = bound(
        256 * MIB, "bytes", "A longer answer ends with an error.", setting="MUSTER_MAX_STREAM_BYTES", minimum=1024
    )
    max_buffer_bytes: int = bound(
        4 * MIB,
        "bytes",
        "A node waits while so much of its stream waits for a slow client.",
        setting="MUSTER_MAX_BUFFER_BYTES",
        minimum=64 * 1024,
    )
    retention_days: int = bound(
        30, "days", "Older request records are dropped.", setting="MUSTER_REQUEST_RETENTION_DAYS", minimum=1
    )
    # Sums for charts
    rollup_batch: int = bound(20_000, "events", "Further events are added to the sums of charts in another batch.")
    rollup_budget_s: float = bound(8.0, "s", "A round of sums for charts begins no further batch.")
    rollup_memory_mb: int = bound(32, "MiB", "PostgreSQL sorts and groups what takes more memory of a batch on its disk.")
    rollup_forgotten: int = bound(10_000, "rows", "One round deletes no more old sums of a table.")
    rollup_minutes_days: int = bound(2, "days", "Older sums of minutes are deleted.")
    rollup_tens_days: int = bound(30, "days", "Older sums of ten minutes are deleted.")
    rollup_hours_days: int = bound(30, "days", "Older sums of hours are deleted.")
    rollup_days: int = bound(
        3_650, "days", "Older sums of days are deleted.", setting="MUSTER_CHART_RETENTION_DAYS", minimum=31
    )
    chart_points: int = bound(180, "points", "A chart with more has longer steps.")
    # Clients
    keep_alive_s: float = bound(75.0, "s", "An idle connection of a client is closed.")
    upstream_connect_s: float = bound(5.0, "s", "A node that is called over HTTP counts as out of reach.")
    preflight_age_s: int = bound(600, "s", "A browser asks again which requests a page may send.")
    list_parameters: int = bound(32, "parameters", "A list request with more of them is refused with 400.")
    # As in Anthropic's reference, "List Models". Unlike there it is the default too: who does not page misses nothing.
    list_rows: int = bound(1000, "rows", "A larger `limit` of a list is refused with 400; lists of models have so many.")
    list_default_rows: int = bound(50, "rows", "A list of requests without `limit` has so many.")
    input_items: int = bound(100, "items", "A larger `limit` of a list of input items is refused with 400.")
    input_default_items: int = bound(20, "items", "A list of input items without `limit` has so many.")
    # Queue and relay
    busy_pause_s: float = bound(0.05, "s", "A node that refused a request as busy is asked again, unless it says when.")
    # No alias has more targets.
    candidates: int = bound(16, "models", "Further models that a request could go to are not looked at.")
    fallbacks: int = bound(8, "models", "A request that names more fallbacks is refused with 400.")
    latency_ms: int = bound(3_600_000, "ms", "A request that allows a longer wait (`max_latency_ms`) is refused with 400.")
    rate_window_s: float = bound(60.0, "s", "A request that is older counts no more towards the limit of its key.")
    hold_bytes: int = bound(MIB, "bytes", "A larger unstreamed answer goes out as it comes; of an error only so much is read.")
    whole_bytes: int = bound(16 * MIB, "bytes", "A larger answer that has to be translated as a whole ends with an error.")
    end_bytes: int = bound(64 * 1024, "bytes", "So much of a large answer is sent only when its record is written.")
    # Its link may still say what was counted.
    closed_s: float = bound(0.5, "s", "An engine that sent its closing event and did not end its stream is ended.")
    max_engine_error_chars: int = bound(
        WIRE.error_quote_chars, "characters", "More of what an engine says of a failure is neither kept nor logged."
    )
    # Records
    max_pending_records: int = bound(100_000, "records", "One more is dropped and counted.")
    record_integer: int = bound(2**31 - 1, "", "A larger count is cut to it, a larger limit refused: PostgreSQL's `integer`.")
    # Nodes that say at once that they are busy are asked many times a second.
    record_attempts: int = bound(2**15 - 1, "attempts", "A larger number is cut to it: PostgreSQL's `smallint`.")
    records_linger_s: float = bound(0.02, "s", "A change that nobody waits for is committed.")
    records_retry_s: float = bound(0.25, "s", "The writer tries again after an error of the database.")
    # A slow database must not hold it.
    records_send_s: float = bound(0.25, "s", "A finished answer waits no longer for the statement of its end.")
    # An insert that was cut off may still arrive: the server ends it after five seconds.
    records_late_s: float = bound(6.0, "s", "Inserts that were cut off are closed so long after the database is back.")
    # A little more than the server gives a statement: only one that is frozen or gone stays silent for longer.
    records_silence_s: float = bound(6.0, "s", "The writer gives up a connection that is silent for so long.")
    # They take a millisecond or two, and whoever is accepted waits for that.
    records_refused_batch: int = bound(50, "rows", "Further rows of refused requests go with a later commit.")
    refusals_per_minute: int = bound(60, "rows", "Further refusals of a key get no row.")
    orphans_batch: int = bound(1000, "rows", "One statement closes no more requests of gateways that died.")
    partition_days_ahead: int = bound(7, "days", "Partitions of so many days to come are made.")
    # Requests wait behind whoever maintains the partitions for at most this long.
    partition_lock_ms: int = bound(2000, "ms", "Who could not lock the table of records tries again with the next call.")
    usage_tries: int = bound(4, "places", "Earlier places of a piece are not searched for usage.")
    usage_bytes: int = bound(4096, "bytes", "A usage object that is longer is not read.")
    # Keys and catalogue
    unknown_key_s: float = bound(2.0, "s", "A key that was unknown is looked up again.")
    unknown_keys: int = bound(10_000, "keys", "All unknown keys are forgotten when one more comes.")
    # Rows are never deleted, and the playground makes a key an hour for each session.
    ended_key_s: float = bound(86_400.0, "s", "Keys that ended longer ago are not held in memory.")
    key_models: int = bound(200, "models", "A key that names more is refused.")
    name_chars: int = bound(80, "characters", "A longer name of a key or tenant is refused.")
    model_name_chars: int = bound(200, "characters", "A longer name of a model is refused.")
    requirements_bytes: int = bound(16_384, "bytes", "A longer document of what a model needs is refused.")
    requirements_quantizations: int = bound(32, "quantizations", "A document with more of them is refused.")
    requirements_word_chars: int = bound(40, "characters", "A longer word of such a document is refused.")
    requirements_mb: int = bound(2**25, "MiB", "More memory in such a document is refused.")
    alias_weight: int = bound(1_000_000, "", "A larger weight of an alias's target is refused.")
    kept_days: int = bound(3650, "days", "A tenant's answers cannot be kept for longer.")
    # Processes
    dead_s: float = bound(10.0, "s", "A gateway that wrote no heartbeat is taken for dead, and its requests are closed.")
    forgotten_s: float = bound(86_400.0, "s", "A gateway that has been silent for so long is left out of Overview.")
    sweep_s: float = bound(2.0, "s", "Keys, models and nodes are read again.")
    # A storm of hints costs ten sweeps a second at most.
    hint_pause_s: float = bound(0.1, "s", "After the sweep for a hint no further hint is followed for so long.")
    hint_rows: int = bound(100, "rows", "Hints that name more rows by the next look are followed by a sweep.")
    tick_s: float = bound(1.0, "s", "The silence of nodes is judged again.")
    heartbeat_s: float = bound(2.0, "s", "The gateway says again that it lives.")
    # A load that makes progress says something every second.
    presence_s: float = bound(0.9, "s", "What nodes newly said is written.")
    presence_full_rounds: int = bound(3, "rounds", "Every so many rounds all nodes are written: that is their heartbeat.")
    reconcile_s: float = bound(5.0, "s", "Requests of gateways that died are looked for again.")
    reload_s: float = bound(300.0, "s", "All keys are read again, changed or not.")
    # Canary questions
    canary_look_s: float = bound(5.0, "s", "The gateway looks again which questions are due.")
    canary_deadline_s: float = bound(30.0, "s", "A question without an answer counts for nothing.")
    canary_again_s: float = bound(60.0, "s", "A node that answered wrongly is asked again, or after a shorter interval.")
    # The node may be full, or not asked any more.
    canary_missed: int = bound(3, "intervals", "Without an answer for so long the ejection for a wrong one ends.")
    canary_tokens: int = bound(64, "tokens", "An answer to a canary question is cut there.")
    canary_question_chars: int = bound(500, "characters", "A longer question is refused.")
    canary_answer_chars: int = bound(200, "characters", "A longer expected answer is refused.")
    # Counting tokens
    count_threads: int = bound(2, "threads", "Further prompts wait for a thread, each of which has a process that counts.")
    count_waiting: int = bound(8, "prompts", "One more prompt that would wait is counted by a node, or estimated.")
    # The first one of a model loads its tokenizer, which takes a second or two.
    count_thread_s: float = bound(5.0, "s", "A prompt that takes a thread longer is counted by a node, or estimated.")
    count_rest_s: float = bound(60.0, "s", "A tokenizer that cost a process is not asked for so long.")
    count_nodes: int = bound(2, "nodes", "After so many nodes that gave no count it is estimated.")
    count_asked: int = bound(32, "questions", "Further questions to nodes wait.")
    count_node_ms: int = bound(3000, "ms", "A node that gave no count by then is not waited for.")
    count_body_bytes: int = bound(8 * MIB, "bytes", "A larger body is not sent to a node for its count.")
    count_answer_bytes: int = bound(16 * 1024, "bytes", "A longer answer is no count.")
    count_large_bytes: int = bound(512 * 1024, "bytes", "A larger body is worked on in a thread.")
    count_complain_s: float = bound(60.0, "s", "The log hears of a model's unusable tokenizer no more often.")
    count_complaints: int = bound(1000, "models", "All are forgotten when one more complaint comes.")
    count_folders: int = bound(8, "tokenizers", "The one that was used longest ago leaves the memory.")
    count_file_bytes: int = bound(128 * MIB, "bytes", "A folder with a larger file is unusable.")
    template_source_chars: int = bound(MIB, "characters", "A longer chat template is unusable.")
    # What is longer takes too much memory to count.
    template_chars: int = bound(
        2_000_000, "characters", "No longer prompt is rendered; a longer text of a template is given up."
    )
    template_s: float = bound(2.0, "s", "A template that takes more of a processor's time is given up.")
    template_bytes: int = bound(128 * MIB, "bytes", "A template that needs more memory is given up.")
    # Of UTF-8: four letters of English, two of Russian, four thirds of a Chinese character.
    token_bytes: int = bound(4, "bytes", "An estimate counts one token for so many of a prompt.")
    token_chars: int = bound(4, "characters", "The record estimates one token for so many of a request or an answer.")
    token_message: int = bound(4, "tokens", "An estimate adds so many for each message.")
    token_answer: int = bound(3, "tokens", "An estimate adds so many where the answer begins.")
    # Models differ too much to say it better without them.
    token_media: int = bound(1024, "tokens", "An estimate counts so many for a picture, a recording or a file.")
    # Dialects
    form_parts: int = bound(64, "parts", "A form with more is refused with 400.")
    form_field_bytes: int = bound(1024, "bytes", "A form with a longer field that the gateway reads is refused with 400.")
    form_boundary_bytes: int = bound(200, "bytes", "A form with a longer boundary is refused with 400.")
    form_piece_bytes: int = bound(64 * 1024, "bytes", "A form is read in such pieces; blanks behind a boundary fill none.")
    fault_reason_chars: int = bound(200, "characters", "The reason of a 400 is cut there.")
    fault_field_chars: int = bound(80, "characters", "The name of a field in a 400 is cut there.")
    fault_shown_chars: int = bound(60, "characters", "A longer name from a client is not repeated in an error.")
    ignored_names: int = bound(32, "names", "Further fields that a translation leaves out are not named.")
    ignored_name_chars: int = bound(64, "characters", "The name of a field that a translation leaves out is cut there.")
    # Of each stream that may go on at another node, in memory.
    continued_bytes: int = bound(256 * 1024, "bytes", "A stream with more text is not resumed when its node dies.")
    # Of all blocks that wait.
    held_chars: int = bound(4 * MIB, "characters", "A translated answer that comes out of order ends with an error beyond it.")
    waiting_blocks: int = bound(
        2 * WIRE.answer_calls, "blocks", "A translated answer with more blocks that wait ends in an error."
    )
    # An engine may give the whole arguments of a call at once.
    chat_event_bytes: int = bound(32 * MIB, "bytes", "A stream that is translated and has a larger event ends with an error.")
    # Of all texts, arguments and log probabilities: they are said again, several times, at the end.
    responses_answer_chars: int = bound(32 * MIB, "characters", "A longer translated answer ends with an error (Responses).")
    refusal_chars: int = bound(1000, "characters", "What an engine says of a refusal is cut there for the caller.")
    tool_levels: int = bound(64, "levels", "A tool of an unknown kind that is nested deeper is refused with 400.")
    # Kept answers
    store_s: float = bound(5.0, "s", "An answer that is not kept by then is not kept; one that continues another is 503.")
    # What we say is not kept is then really not kept.
    store_margin_s: float = bound(0.5, "s", "Writing ends so long before the gateway stops waiting for it.")
    kept_read_s: float = bound(10.0, "s", "Reading or deleting a kept answer ends with 503.")
    kept_turns: int = bound(200, "turns", "A longer conversation cannot be continued.")
    kept_bytes: int = bound(32 * MIB, "bytes", "A larger conversation cannot be continued, a larger turn is not kept.")
    # Few, because each may hold megabytes.
    kept_batch: int = bound(200, "rows", "One statement deletes no more expired answers.")
    # Pages
    page_own_days: int = bound(30, "days", "A page of a tenant for its members sums no earlier usage up.")
    page_own_requests: int = bound(50, "requests", "Further requests of a tenant are on the next page for its members.")
    page_choices: int = bound(200, "choices", "A filter offers no more.")
    page_request_rows: int = bound(50, "requests", "A page of requests shows no more.")
    page_scanned_first: int = bound(1_000, "records", "A page looks through so many first for what has no index.")
    page_scanned_records: int = bound(
        20_000, "records", "A page looks through no more for what has no index, and says how far back it looked."
    )
    page_budget_percent: float = bound(80.0, "%", "A budget of which more is taken is shown as nearly used up.")
    page_usage_rows: int = bound(100, "rows", "The table of usage counts further pairs of tenant and model together.")
    page_ticks: int = bound(5, "stretches", "The time axis of a request has no more.")
    page_bar_percent: float = bound(0.3, "%", "A shorter stretch of a request's time is drawn as wide as this.")
    page_export_batch: int = bound(2_000, "rows", "The further rows of a file are read with another statement.")
    page_export_rows: int = bound(100_000, "rows", "A file of requests or of usage is cut there, and its last line says so.")
    page_node_requests: int = bound(20, "requests", "The page of a node shows no more of the newest ones.")
    page_node_recent_s: float = bound(86_400.0, "s", "The page of a node shows no older ones.")
    page_exact_rows: int = bound(10_000, "rows", "A longer list shows an estimate of its length.")
    page_body_chars: int = bound(100_000, "bytes", "A longer kept answer is cut on its page, and not indented.")
    page_models: int = bound(50, "models", "A page of the list of models has no more rows.")
    page_places: int = bound(50, "nodes", "The page of a model shows no more nodes that have it.")
    catalogue_context_tokens: int = bound(8_192, "tokens", "The catalogue reckons with this context.")
    page_waiting_models: int = bound(8, "models", "Overview shows no more models that requests wait for.")
    page_named: int = bound(3, "names", "Further names are counted.")
    page_use_days: int = bound(7, "days", "The lists of keys and tenants say what so many days came to.")
    page_asked_s: float = bound(3600.0, "s", "Requests for models without a node are counted so far back.")
    # Longer than a month.
    budget_told_s: float = bound(32 * 86_400.0, "s", "What was told of a budget earlier says nothing of its day or month.")
    page_key_warning_s: float = bound(7 * 86_400.0, "s", "Overview names keys in use that end within it.")
    metrics_names: int = bound(256, "names", "Further models, nodes or tenants share the series named `others`.")
    # The access log
    access_log_every: int = bound(
        1,
        "requests",
        "One in so many served requests has a line; all others always.",
        setting="MUSTER_ACCESS_LOG_EVERY",
        minimum=1,
    )
    access_log_s: float = bound(0.02, "s", "Lines of requests that ended are handed to the thread that writes them.")
    access_log_waiting: int = bound(10_000, "lines", "A further line is dropped and counted.")
    access_log_batches: int = bound(100, "batches", "Lines are dropped and counted while nobody reads standard error.")
    access_log_stop_s: float = bound(2.0, "s", "A gateway that stops waits no longer for its last lines to be written.")
    # The HTTP server of a gateway (controlplane.gateway_server)
    server_backlog: int = bound(2_048, "connections", "The kernel refuses a further connection that waits to be accepted.")
    server_tick_s: float = bound(1.0, "s", "The date that answers carry is renewed.")
    server_stop_poll_s: float = bound(0.05, "s", "A gateway that stops looks again whether requests still run.")
    server_pipelined: int = bound(64, "requests", "A connection with more requests that wait for an earlier answer is closed.")
    known_heads: int = bound(1024, "heads", "The server forgets which request heads it has read before it remembers more.")
    known_head_bytes: int = bound(4 * 1024, "bytes", "A longer request head is parsed each time it comes.")
    known_answer_heads: int = bound(4096, "heads", "The server forgets the rendered heads of answers before it remembers more.")
    server_ahead_bytes: int = bound(64 * 1024, "bytes", "More bytes behind the request that is answered stop the reading.")
    server_fragment_bytes: int = bound(MIB, "bytes", "A longer WebSocket message is sent in fragments of this size.")
    # A client may go on sending for as long as it likes.
    server_linger_s: float = bound(30.0, "s", "A connection that was answered early, before its body came, is closed.")
    server_linger_idle_s: float = bound(2.0, "s", "A connection that was answered early is closed when nothing more comes.")
    server_linger_bytes: int = bound(128 * MIB, "bytes", "A connection that was answered early is closed when more came.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleLimits:
    """Pages of the control plane, its live pushes, the playground, and its servers."""

    # Pages and live pushes
    push_s: float = bound(2.0, "s", "A page gets its next push, with a hint or without.")
    push_changes_s: float = bound(0.5, "s", "A page on which a model is loaded or an operation runs gets its next push.")
    # A storm of hints costs at most four looks a second and page.
    push_pause_s: float = bound(0.25, "s", "A page is pushed to again.")
    push_overview_s: float = bound(4.0, "s", "Open Overviews get their next push.")
    push_sums_s: float = bound(10.0, "s", "An open Overview gets its charts and figures anew.")
    push_check_s: float = bound(10.0, "s", "An open Overview whose session has ended is closed.")
    overview_nodes: int = bound(20, "nodes", "Further nodes are counted on Overview instead.")
    overview_models: int = bound(4, "models", "Further models of a node are counted on Overview instead.")
    overview_top: int = bound(5, "rows", "Further models and tenants are not shown on Overview.")
    overview_change_percent: float = bound(1.0, "%", "A smaller change is shown without a percentage.")
    overview_judged_percent: float = bound(5.0, "%", "A larger change is called better or worse on Overview.")
    search_chars: int = bound(200, "characters", "A longer search term is cut.")
    search_rows: int = bound(5, "rows", "Further rows of a kind are not found.")
    problem_look_s: float = bound(5.0, "s", "The control plane looks for problems again.")
    problem_look_max_s: float = bound(15.0, "s", "A look that takes long is followed by no longer pause.")
    problem_look_pauses: int = bound(
        20, "times", "The pause after a look is so many times as long as the look, if that is more."
    )
    problem_messages: int = bound(5, "messages", "A look for problems sends no further ones that are overdue.")
    problem_lines: int = bound(12, "lines", "Further problems on the first page are counted instead.")
    # Fifty silent nodes shall hide nothing else.
    problem_lines_per_case: int = bound(3, "lines", "Further lines of one case are counted instead.")
    problem_queue_s: float = bound(2.0, "s", "A request that waits longer for a node is shown as a problem.")
    problem_failed: int = bound(
        5, "requests", "So many failed requests are a problem, if `problem_failed_percent` is reached too."
    )
    problem_failed_percent: float = bound(5.0, "%", "Failed requests are shown as a problem when they are so large a part.")
    system_queued_tasks: int = bound(1_000, "tasks", "More in the worker's queue are shown as a problem.")
    system_certificate_days: int = bound(30, "days", "A CA that expires sooner is shown as a problem.")
    problem_sums_s: float = bound(120.0, "s", "Sums of charts that are older are shown as a problem.")
    problem_drained_s: float = bound(3_600.0, "s", "A node that was drained so long ago is shown as a problem.")
    problem_authority_s: float = bound(30 * 86_400.0, "s", "A CA of nodes that expires sooner is shown as a problem.")
    problem_policy_s: float = bound(30 * 86_400.0, "s", "A policy that expires sooner is shown as a problem.")

    # Playground
    playground_form_bytes: int = bound(8 * MIB, "bytes", "A longer form is refused.")
    playground_image_bytes: int = bound(5 * MIB, "bytes", "A larger picture is refused.")
    # Their code could not be printed, and schemas have ten levels.
    playground_tool_depth: int = bound(64, "levels", "Tools that are nested deeper are refused.")
    # The endpoint wants a number.
    playground_messages_tokens: int = bound(1_024, "tokens", "A form that says nothing asks for so many on Messages.")
    # A person waits meanwhile.
    playground_turns: int = bound(200, "turns", "A conversation in the playground with more earlier turns is refused.")
    playground_trial_tokens: int = bound(32, "tokens", "The answer to the test request of a new key or node is cut.")
    playground_explained: int = bound(16, "models", "The nodes of further models of an alias are not looked at.")
    playground_key_s: float = bound(3_600.0, "s", "A key that the playground lends expires.")
    # A request that waits in a queue still needs it.
    playground_key_reserve_s: int = bound(60, "s", "A key with less time left is replaced.")
    playground_nodes: int = bound(100, "nodes", "The playground takes no tickets for further nodes.")
    playground_answers: int = bound(32, "answers", "A further answer of one process is refused.")
    playground_answer_bytes: int = bound(64 * MIB, "bytes", "A longer answer is cut.")
    playground_chunks: int = bound(16, "chunks", "With so many chunks waiting for a browser the gateway is not read.")
    playground_connect_s: float = bound(5.0, "s", "A gateway that does not take the connection counts as unreachable.")
    playground_take_s: float = bound(60.0, "s", "An answer of which a browser takes nothing for so long is cut.")
    # The gateway itself ends an answer with an error at that time-out.
    playground_overtime_s: float = bound(30.0, "s", "An answer is cut so long after MUSTER_REQUEST_TIMEOUT_S.")
    playground_close_s: float = bound(2.0, "s", "Nobody waits longer for a connection to the gateway to close.")

    # Servers of the control plane
    retry_s: int = bound(5, "s", "An answer of a server that has no database names it as `Retry-After`.")
    # No name is longer.
    refused_host_chars: int = bound(255, "characters", "A longer refused Host header is cut where it is shown.")
    # Supervisors wait longer for the answer.
    health_database_s: float = bound(3.0, "s", "A database that does not answer is `unreachable`.")
    connections: int = bound(
        1_000, "connections", "One more of a process is refused; half may be of one address that is no proxy's."
    )
    # The largest is a picture in the playground.
    body_bytes: int = bound(8 * MIB, "bytes", "A longer body gets 413 `body_too_large`.")
    socket_message_bytes: int = bound(64 * 1024, "bytes", "A longer message of a page closes its socket; pages send nothing.")
    inbox_high: int = bound(16, "messages", "An application that has more messages waiting stops the reading of its socket.")
    inbox_low: int = bound(4, "messages", "An application that has so few messages waiting lets its socket be read again.")
    stop_poll_s: float = bound(0.05, "s", "A server that stops looks again whether requests still run.")
    reconcile_s: float = bound(5.0, "s", "The reconciler of operations looks again.")
    # Its transaction rolls back.
    reconcile_stop_s: float = bound(5.0, "s", "A server that stops no longer waits for the look of the reconciler.")

    # Workers and commands
    task_message_bytes: int = bound(16 * 1024, "bytes", "A longer message of the broker is set aside; ours have about 1 KiB.")
    # A worker would hold it in memory until then.
    task_ahead_s: float = bound(120.0, "s", "A message for a later time is set aside.")
    task_kept: int = bound(100, "messages", "The oldest message that was set aside is forgotten.")
    task_kept_bytes: int = bound(4_096, "bytes", "A longer message that is set aside is cut.")
    audit_progress_records: int = bound(5_000, "records", "The command that checks the log says how far it is.")
    progress_s: float = bound(0.2, "s", "A command that takes long says how far it is.")
    backup_piece_bytes: int = bound(256 * 1024, "bytes", "A backup is read and written in such pieces.")
    backup_told_bytes: int = bound(64 * MIB, "bytes", "A longer manifest of a backup is refused.")
    backup_spare_bytes: int = bound(16 * MIB, "bytes", "A backup leaves so much of a disk free, or does not begin.")
    backup_passphrase_chars: int = bound(12, "characters", "A shorter passphrase of a backup is refused.")
    backup_age_s: float = bound(
        7 * 86_400.0,
        "s",
        "A last backup that is older is shown as a problem, if there ever was one.",
        setting="MUSTER_BACKUP_AGE_DAYS",
        minimum=1,
        factor=86_400,
    )
    operate_answer_s: float = bound(5.0, "s", "A part that `./muster doctor` asks and that does not answer is silent.")
    doctor_s: float = bound(15.0, "s", "A check of `./muster doctor` that takes longer has failed.")
    doctor_free_bytes: int = bound(1024 * MIB, "bytes", "With less space on a disk `./muster doctor` warns.")
    doctor_clock_s: float = bound(2.0, "s", "`./muster doctor` warns when the clock of the database differs by more.")
    doctor_certificate_days: int = bound(21, "days", "`./muster doctor` warns of a certificate that expires sooner.")
    log_lines: int = bound(100, "lines", "`./muster logs` begins with no more.")
    log_poll_s: float = bound(0.5, "s", "`./muster logs -f` looks again.")
    chat_answer_s: float = bound(600.0, "s", "`./muster chat` gives up on an answer in which nothing comes.")
    enrolment_nodes: int = bound(64, "nodes", "The credentials of a fresh installation enrol no further node.")
    approve_s: float = bound(30.0, "s", "`./muster approve` gives up on a server that does not answer.")
    approve_answer_bytes: int = bound(1_000_000, "bytes", "`./muster approve` does not read a longer answer.")
    approve_error_chars: int = bound(500, "characters", "`./muster approve` cuts a longer error of the server.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherLimits:
    """``./muster up``: the embedded servers and the processes that it supervises."""

    # Supervision
    restart_first_s: float = bound(0.5, "s", "A process that died twice is started again; each further pause is twice as long.")
    restart_max_s: float = bound(15.0, "s", "The pause before a process is started again grows no longer.")
    restart_healthy_s: float = bound(10.0, "s", "A process that ran so long and died is started again at once.")
    startup_failures: int = bound(3, "starts", "A process that died so often before everything was ready ends the start.")
    start_s: float = bound(90.0, "s", "A process that is not ready ends the start.")
    late_s: float = bound(10.0, "s", "A process that is not ready is named, again and again.")
    stop_s: float = bound(10.0, "s", "A process that does not stop is killed.")
    attach_stop_s: float = bound(120.0, "s", "`./muster down` gives up on a launcher that still runs.")
    ready_poll_s: float = bound(0.1, "s", "A process that is not ready is asked again.")
    ready_answer_s: float = bound(1.0, "s", "A process that does not answer when asked is not ready.")
    ready_answer_bytes: int = bound(MIB, "bytes", "No more of an answer is read.")
    leftover_s: float = bound(3.0, "s", "A process of an earlier run that ignores a signal gets the next, harder one.")
    # Some programs try every number up to their limit when they start.
    open_files: int = bound(65_536, "files", "The processes may open no more.")

    # Preparation
    bootstrap_s: float = bound(300.0, "s", "A database that is not prepared ends the start.")
    copy_lock_s: float = bound(120.0, "s", "The start ends if another launcher still copies PostgreSQL.")
    install_lock_s: float = bound(900.0, "s", "The start ends if another launcher still installs packages.")
    install_said_s: float = bound(2.0, "s", "The installation says how far it is.")
    # An address holds 104 bytes on macOS, 108 on Linux.
    socket_directory_bytes: int = bound(80, "bytes", "Sockets whose directory has a longer path go to a short one.")
    bootstrap_said_s: float = bound(3.0, "s", "A person who waits for the database is told so.")
    bootstrap_said_again_s: float = bound(10.0, "s", "A person who waits for the database is told so again.")

    # Logs
    log_bytes: int = bound(8 * MIB, "bytes", "A longer log is copied aside and emptied.")
    log_rotate_s: float = bound(60.0, "s", "The launcher looks again whether a log is too long.")
    log_tail_bytes: int = bound(4_096, "bytes", "No more of the end of a log is shown.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """All limits of one process."""

    core: CoreLimits = field(default_factory=CoreLimits)
    governance: GovernanceLimits = field(default_factory=GovernanceLimits)
    nodes: NodeLimits = field(default_factory=NodeLimits)
    gateway: GatewayLimits = field(default_factory=GatewayLimits)
    console: ConsoleLimits = field(default_factory=ConsoleLimits)
    launcher: LauncherLimits = field(default_factory=LauncherLimits)


_current = Limits()


def limits() -> Limits:
    """Return the limits of this process."""
    return _current


def install(chosen: Limits) -> Limits:
    """Let ``chosen`` hold from now on; return what held before. The settings do it at the start of a process, and tests."""
    global _current
    before, _current = _current, chosen
    return before

"""Limits of a server process: every bound and time-out of ours, what it is counted in, and what happens at it.

``limits()`` is read where a bound applies; whoever serves each request takes its section once, when it is built. No module
keeps a number of its own (``tests/test_architecture.py`` names the few that are no bounds). ``docs/settings.md`` is made from
this file and from ``runner/limits.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wire.limits import bound

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLimits:
    """Database, hints and throttles of every process."""


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
    approval_last_warning_percent: int = bound(
        90, "%", "Approvers are reminded for the last time when so much of the time to decide has passed."
    )
    review_s: float = bound(86_400.0, "s", "Approvers are reminded of a break-glass operation that nobody reviewed.")
    sweep_batch: int = bound(100, "operations", "Further operations wait for the next sweep.")
    policy_life_s: float = bound(730 * 86_400.0, "s", "A policy that names no end expires.")

    # Runs of operations on nodes
    run_lease_s: float = bound(10.0, "s", "A run that somebody took and did not move on is due again.")
    run_look_again_s: float = bound(
        300.0, "s", "A dispatched run is looked at again, only to give it up: whoever holds the socket asks the node."
    )
    run_silence_s: float = bound(
        86_400.0,
        "s",
        "A node that says nothing for so long after the window is given up; its run ends as resolved and says so.",
    )
    run_pause_max_s: float = bound(30.0, "s", "The pause before a run is sent again grows no longer.")
    run_retry_s: float = bound(5.0, "s", "A run that cannot be dispatched at the moment is tried again.")
    run_message_chars: int = bound(500, "characters", "A longer message of a run is cut.")
    op_token_s: int = bound(300, "s", "The node refuses an op token that is older.")
    fence_ahead_ms: int = bound(
        86_400_000,
        "ms",
        "The log says that the clock was wrong when a fence is further ahead of it: nodes refuse one a week ahead of theirs.",
    )
    receipt_bytes: int = bound(16_384, "bytes", "A longer receipt is not shown.")

    # Pages and the REST API of operations
    page_rows: int = bound(100, "operations", "A page of operations shows no further ones.")
    page_recent_s: float = bound(2 * 86_400.0, "s", "An operation that was decided earlier leaves the first page.")
    history_rows: int = bound(50, "operations", "Further operations are on the next page of the history.")
    api_body_bytes: int = bound(MIB, "bytes", "A longer body gets 413 `body_too_large`.")
    api_page_rows: int = bound(50, "operations", "A list that names no limit returns so many.")
    api_page_max_rows: int = bound(200, "operations", "A greater limit of a list is refused.")
    api_integer: int = bound(2**31 - 1, "", "A greater version of a policy is refused: it is the largest of a column.")
    api_id: int = bound(2**63 - 1, "", "A greater id is refused: it is the largest of a column.")
    idempotency_key_chars: int = bound(120, "characters", "A longer `Idempotency-Key` is refused.")
    stream_max: int = bound(
        32, "streams", "A further stream of one process gets 503: each looks at the rows every few seconds."
    )
    stream_poll_s: float = bound(2.0, "s", "A stream looks at its operation, with a hint or without.")
    stream_pause_s: float = bound(0.25, "s", "A stream looks again, in a storm of hints too.")
    stream_heartbeat_s: float = bound(10.0, "s", "A stream that had nothing to say sends a comment.")
    stream_look_s: float = bound(10.0, "s", "A stream whose look takes longer is cut; its client comes back.")
    stream_layer_s: float = bound(2.0, "s", "A stream gives up on hints, and only polls.")

    # Audit
    audit_events_per_hour: int = bound(
        20,
        "events",
        "Further events of one action by one node are not written: nothing is ever removed from the log.",
    )
    audit_alarms_per_hour: int = bound(
        10, "events", "Further alarms of one witness are not written: a stolen node may sign whatever it likes."
    )
    audit_tail_entries: int = bound(1_000, "entries", "A page checks no more of the end of the log while somebody waits.")
    audit_read_rows: int = bound(2_000, "rows", "A reader of the whole log fetches so many at once.")
    checkpoint_entries: int = bound(1_000, "entries", "With so many new entries a checkpoint is due.")
    checkpoint_age_s: float = bound(300.0, "s", "With any new entry a checkpoint is due when the last one is so old.")

    # Sign-in, people and their keys
    session_idle_s: int = bound(30 * 60, "s", "A person who did nothing for so long is signed out.")
    session_max_s: int = bound(12 * 3600, "s", "A person who signed in so long ago is signed out.")
    session_seen_s: int = bound(60, "s", "That a person did something is stored again.")
    challenge_s: int = bound(300, "s", "An answer to an older challenge of a passkey is refused.")
    sign_in_forget_s: float = bound(3_600.0, "s", "Wrong tries that are older no longer count.")
    sign_in_known_s: float = bound(
        30 * 86_400.0, "s", "An address from which a name signed in well no longer counts as one of that name."
    )
    sign_in_body_bytes: int = bound(64 * 1024, "bytes", "A longer answer of a sign-in script is refused.")
    proof_body_bytes: int = bound(16 * 1024, "bytes", "A longer proof of a decision is refused.")
    invitation_max_hours: int = bound(24 * 14, "h", "An invitation with a longer life is refused.")
    passkey_ms: int = bound(120_000, "ms", "The browser gives up to ask for a passkey.")
    passkey_decision_ms: int = bound(300_000, "ms", "The browser gives up to ask for the passkey of a decision.")
    passkey_id_chars: int = bound(300, "characters", "A passkey with a longer id is refused.")
    one_time_password_steps: int = bound(
        1, "steps", "A code that is off by more steps of 30 s is refused: the clock of a telephone may be wrong."
    )
    key_label_chars: int = bound(80, "characters", "A longer name of an approver's key is refused.")
    token_name_chars: int = bound(80, "characters", "A longer name of an admin token is refused.")
    token_use_s: float = bound(60.0, "s", "The use of an admin token is stored again.")

    # Notices
    notice_budget_s: float = bound(30.0, "s", "A round of deliveries begins no further one.")
    notice_lease_s: float = bound(
        60.0, "s", "A notice that somebody claimed and did not finish goes to the next; one attempt takes less."
    )
    notice_pause_s: float = bound(30.0, "s", "A notice that failed is tried again; each further pause is twice as long.")
    notice_pause_max_s: float = bound(3_600.0, "s", "The pause between two tries grows no longer.")
    notice_give_up_s: float = bound(86_400.0, "s", "A notice that is so old is given up, and the log says so.")
    notice_error_chars: int = bound(300, "characters", "A longer error of a delivery is cut.")
    notice_unreadable_s: float = bound(3_600.0, "s", "Approvers are told of further messages that workers set aside.")
    webhook_name_chars: int = bound(80, "characters", "A longer name of a webhook is refused.")
    webhook_url_chars: int = bound(300, "characters", "A longer URL of a webhook is refused.")
    webhook_s: float = bound(10.0, "s", "A webhook that does not answer by then has failed.")
    webhook_lookup_s: float = bound(3.0, "s", "A webhook whose name is not resolved by then has failed.")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLimits:
    """Links to nodes, what nodes report, and commands to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits:
    """Requests: their admission, queue, relay, records and dialects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleLimits:
    """Pages of the control plane, its live pushes, the playground, and its servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherLimits:
    """``./muster up``: the embedded servers and the processes that it supervises."""


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

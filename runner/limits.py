"""Limits of a runner and of the programs it starts for engines: every bound and time-out, its unit, and what happens at it.

``limits()`` is read where a bound applies; whoever serves each request or frame takes its section once, when it is built.
The environment fills the fields that name a ``setting`` (``runner.config``). The twin of ``core/limits.py``; it needs the
standard library and ``wire`` alone, because the programs of engines read it too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wire.limits import bound

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiLimits:
    """The node's own HTTP port."""

    connections: int = bound(1000, "connections", "A further connection or request gets 503 without being read.")
    keepalive_s: int = bound(5, "s", "An idle connection is closed.")
    start_s: float = bound(10.0, "s", "The runner ends: its port did not open.")
    date_s: float = bound(1.0, "s", "The `Date` header of answers is put right.")
    grace_s: int = bound(
        2, "s", "What is left of answers is cut when the runner leaves; drained requests had their time before."
    )

    json_bytes: int = bound(64 * MIB, "bytes", "An inference request gets 413.")
    form_bytes: int = bound(512 * MIB, "bytes", "An upload of audio gets 413; its engine may take less.")
    form_parts: int = bound(64, "parts", "The form gets 400.")
    form_value_bytes: int = bound(1000, "bytes", "A field of the form that the runner reads itself gets 400.")
    operation_bytes: int = bound(8 * MIB, "bytes", "A request of any other endpoint gets 413.")
    held_bytes: int = bound(1024 * MIB, "bytes", "A request gets 503 while the bodies of all others fill this.")
    body_silence_s: float = bound(30.0, "s", "A client that sends nothing more of its body gets 408.")
    client_stall_s: float = bound(60.0, "s", "A client that takes nothing of its answer is taken to have gone.")

    capabilities_s: float = bound(5.0, "s", "What the node can do is put together anew.")
    version_chars: int = bound(40, "characters", "The version of an engine is cut in the node's name of it.")
    shapes: int = bound(1000, "models", "The shapes of models that were read are forgotten, all at once.")
    free_share: float = bound(0.02, "share", "The node calls itself unhealthy while less of its memory is free.")
    saturated_share: float = bound(0.9, "share", "The node calls itself unhealthy while more of its queue is taken.")
    metrics_tenants: int = bound(100, "tenants", "Metrics leave out further tenants of a model; those with work come first.")
    page_names: int = bound(40, "models", "The page counts further models that could be loaded instead of naming them.")
    page_loading_refresh_s: int = bound(2, "s", "The page is asked for again while a model loads.")
    page_refresh_s: int = bound(15, "s", "The page is asked for again.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Who may wait for a model, and for how long. What the settings file says of a queue is no field of this."""

    timeout_s: float = bound(30.0, "s", "A request that still waits gets 503 `queue_timeout`.", setting="QUEUE_TIMEOUT_MS")
    starvation_s: float = bound(10.0, "s", "A request that waits counts as one priority class higher, at each multiple.")
    idle_tenant_s: float = bound(300.0, "s", "The account of a tenant without work is forgotten.")
    idle_tenants: int = bound(1000, "tenants", "Of accounts without work, the oldest is forgotten.")
    assumed_service_s: float = bound(1.0, "s", "A request is taken to last so long before any has been measured.")
    retry_least_s: int = bound(1, "s", "`Retry-After` of a full queue says no less.")
    retry_most_s: int = bound(60, "s", "`Retry-After` of a full queue says no more.")
    wait_window_s: float = bound(300.0, "s", "An older wait leaves the mean that is reported.")
    wait_samples: int = bound(1000, "requests", "Of the waits in that mean, the oldest leaves it.")

    tenant_chars: int = bound(128, "characters", "A longer name of a tenant is refused.")
    weight: float = bound(1000.0, "weight", "The runner does not start with a higher weight of a tenant.")
    rate: int = bound(
        100_000, "requests", "The runner does not start with a higher rate: a window holds one number per request."
    )
    tenant_windows: int = bound(10_000, "tenants", "Further tenants without a rate of their own share one window.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Links to gateways, and what is reported over them."""

    connect_s: float = bound(10.0, "s", "Dialling a gateway is given up and tried again.")
    ack_s: float = bound(10.0, "s", "A session whose registration was not answered is left.")
    silence_s: float = bound(
        15.0, "s", "A gateway that is not heard is left and dialled again.", setting="MUSTER_OFFLINE_AFTER_S"
    )
    # Its server pings after 30 s without a frame.
    bridge_silence_s: float = bound(90.0, "s", "A server of ModelRelay that is not heard is left and dialled again.")
    heartbeat_s: float = bound(5.0, "s", "A reading is sent, unless the gateway names another interval.")
    reconnect_first_s: float = bound(0.2, "s", "A lost gateway is dialled again within this; the pause doubles each time.")
    reconnect_max_s: float = bound(30.0, "s", "Pauses before dialling grow no longer.", setting="MUSTER_RECONNECT_MAX_S")
    auth_retry_s: float = bound(30.0, "s", "A gateway that refused the credential or the name is dialled again.")
    say_again_s: float = bound(60.0, "s", "The log repeats why there is no connection.")
    healthy_after_s: float = bound(5.0, "s", "A session that lasted this long starts the pauses anew.")
    learned_give_up_s: float = bound(600.0, "s", "A gateway that another one named is no longer dialled.")
    drain_s: float = bound(
        30.0, "s", "Requests that still run when the runner leaves are cut.", setting="MUSTER_RUNNER_DRAIN_S"
    )
    farewell_s: float = bound(1.0, "s", "Leaving waits no longer for what is still to be sent.")
    settle_s: float = bound(2.0, "s", "The first registration waits no longer for engines that start.")

    gateways: int = bound(16, "gateways", "A further gateway that another one names is not dialled.")
    message_bytes: int = bound(64 * MIB, "bytes", "A session that brings a longer message is left.")
    outbox_bytes_max: int = bound(16 * MIB, "bytes", "A session whose gateway does not read is left.")
    outbox_look_s: float = bound(0.02, "s", "A gateway that is behind is looked at again.")
    outbox_bytes: int = bound(256 * 1024, "bytes", "Streams wait while more is still to be sent to their gateway.")
    streams: int = bound(4096, "streams", "A further stream of a session ends at once as busy; those receiving a body count.")
    body_bytes: int = bound(64 * MIB, "bytes", "A stream with a longer request body ends as failed.")
    whole_answer_bytes: int = bound(64 * 1024, "bytes", "A longer whole answer leaves in several frames.")

    report_gap_s: float = bound(0.5, "s", "Changes of load within this time share one message.")
    beat_s: float = bound(0.5, "s", "The runner notes that it runs, so that it can tell when it stood still.")
    reading_s: float = bound(1.0, "s", "The machine is read again.")
    measure_s: float = bound(15.0, "s", "Processes and numbers of engines are read again; that costs more than the machine.")
    facts_s: float = bound(30.0, "s", "What loads of the models take is put together anew.")
    facts: int = bound(32, "models", "A gateway is told no memory and limits of a load of further models.")
    available: int = bound(200, "models", "A gateway is told no further names of models that could be loaded.")
    offers: int = bound(64, "offers", "Further offers of policies and checkpoints are dropped, and come again.")
    detail_chars: int = bound(300, "characters", "What is said of a model is cut.")
    log_warnings: int = bound(500, "lines", "Of the log that the control plane may ask for, older lines from WARNING on go.")
    log_infos: int = bound(100, "lines", "Of that log, older lines at INFO go.")
    log_line_chars: int = bound(400, "characters", "A longer line of that log is cut.")
    log_tail_chars: int = bound(128 * 1024, "characters", "An answer with that log leaves out older lines.")
    log_pause_s: float = bound(1.0, "s", "A further question for the log within it is not answered.")
    gpu_bytes: int = bound(
        2048 * MIB, "bytes", "An AMD GPU with less is no GPU for models: a processor's, with a piece of main memory."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLimits:
    """Requests: their bodies, answers, token counts and costs."""

    whole_bytes: int = bound(
        8 * MIB, "bytes", "A longer unstreamed answer leaves before it is whole, so without final numbers."
    )
    thread_bytes: int = bound(64 * 1024, "bytes", "A longer body is searched in a thread: the loop has other streams to serve.")
    message_chars: int = bound(1000, "characters", "What a model cannot answer is cut.")
    ignored_chars: int = bound(200, "characters", "The header that names ignored fields is cut.")
    text_chars: int = bound(8 * MIB, "characters", "An engine that writes more for one response has failed.")
    tenants: int = bound(1000, "tenants", "Metrics count further tenants together.")

    counts: int = bound(
        2, "requests", "A further token count of a model waits; llama.cpp has four threads for short questions."
    )
    count_s: float = bound(5.0, "s", "A token count gets 503 or 502: it waited that long, or its engine took that long.")
    count_bytes: int = bound(16 * MIB, "bytes", "A token count gets 400.")
    count_waiting_of_tenant: int = bound(16, "requests", "A further token count of a tenant gets 429.")
    count_waiting_of_model: int = bound(64, "requests", "A further token count of a model gets 429.")
    count_waiting: int = bound(128, "requests", "A further token count gets 503.")

    assumed_output_tokens: int = bound(4096, "tokens", "So much is set aside for an answer whose length is not limited.")
    output_tokens: int = bound(100_000_000, "tokens", "No more is set aside for an answer, whatever its request says.")
    cap_retry_s: float = bound(86_400.0, "s", "`Retry-After` of a spending cap says no more.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesLimits:
    """Engines: their processes, loads, health and requests to them, and the life of models on them."""

    silent_s: float = bound(10.0, "s", "An engine that answers no health check is restarted.", setting="MUSTER_ENGINE_SILENT_S")
    restart_first_s: float = bound(0.5, "s", "An engine that died is started again; the pause doubles each time.")
    steady_after_s: float = bound(30.0, "s", "An engine that served this long starts the pauses anew when it dies.")
    unload_s: float = bound(60.0, "s", "An engine that did not unload has failed.")
    unload_drain_s: float = bound(300.0, "s", "Unloading waits no longer for what runs.", setting="MUSTER_UNLOAD_DRAIN_S")
    cut_s: float = bound(5.0, "s", "Unloading waits no longer for requests that it has cut.")
    flush_idle_s: float = bound(2.0, "s", "A flush leaves the refusal to the engine: requests still run.")
    # llama.cpp looks for clients that left once a second, also within a long prompt: what goes on then is the batch of all.
    obey_s: float = bound(2.0, "s", "An engine of ours that goes on with a request whose client has left is restarted.")
    obey_s_per_mib: float = bound(4.0, "s", "More per MiB sent, which it reads first; measured: 0.7 s on one core.")
    # One small grammar can keep llama.cpp's loop for ever, while the threads of its server let go of who asked.
    loop_s: float = bound(20.0, "s", "An engine of ours whose loop does not answer is restarted, after so many batches more.")
    loop_batches: int = bound(8, "batches", "The loop of an engine has the time of so many batches more.")
    obey_look_s: float = bound(0.25, "s", "Clients that left an engine are looked for again.")

    stop_s: float = bound(6.0, "s", "A child process that did not end is killed.")
    last_words_s: float = bound(1.0, "s", "A child process that failed is killed, whether it has said why or not.")
    last_words_lines: int = bound(4, "lines", "Earlier lines of a process that failed are not told.")
    line_bytes: int = bound(
        256 * 1024, "bytes", "A load fails whose child process prints a longer line; of a log it is dropped."
    )
    gone_s: float = bound(5.0, "s", "An unload of vLLM or TGI fails: processes that were killed are still there.")
    gone_poll_s: float = bound(0.02, "s", "Processes that were killed are looked for again.")
    folder_chars: int = bound(
        60, "characters", "Sockets go to /tmp instead of a longer folder: a socket's path has some 100 at most."
    )

    connect_s: float = bound(5.0, "s", "A request fails: the engine takes no connection.")
    keepalive_s: float = bound(4.0, "s", "An idle connection is closed, before llama.cpp and uvicorn do it after 5 s.")
    head_bytes: int = bound(64 * 1024, "bytes", "An answer whose headers are longer is none.")
    question_s: float = bound(5.0, "s", "A short question to an engine has failed.")
    answer_bytes: int = bound(8 * MIB, "bytes", "The answer to a short question counts as none.")
    piece_bytes: int = bound(512 * 1024, "bytes", "A longer body is sent in pieces, so that it does not hold up the loop.")
    # An engine does not hear us leave a count, so this is when it can be taken to have ended with the text.
    count_s: float = bound(60.0, "s", "An engine that did not count tokens counts as silent.")
    said_chars: int = bound(300, "characters", "What an engine says when it fails is cut in an error.")
    logged_chars: int = bound(600, "characters", "What an engine says when it fails is cut in the log.")
    names: int = bound(10, "models", "An error leaves out further models that a server has.")
    shown_bytes: int = bound(MIB, "bytes", "Metrics of an engine are not shown at all.")
    shown_samples: int = bound(1000, "samples", "Further metrics of a replica are not shown.")

    library_load_s: float = bound(1800.0, "s", "A load with CTranslate2, whisper or ExLlamaV3 has failed.")
    whisper_upload_mb: int = bound(100, "MiB", "A longer recording is refused where the model's definition names no limit.")
    excontext_tokens: int = bound(8192, "tokens", "ExLlamaV3 gets this context per slot where none is named.")
    exllama_flush_s: float = bound(90.0, "s", "A flush of ExLlamaV3 has failed.")

    llama_load_s: float = bound(900.0, "s", "A load with llama.cpp has failed.")
    context_tokens: int = bound(
        4096, "tokens", "A slot of llama.cpp, or of a model that names none, has this context where the plan names none."
    )
    llama_batch_s: float = bound(15.0, "s", "llama.cpp is taken to need this for a full batch before it has counted one.")
    llama_watch_s: float = bound(0.25, "s", "How much of the weights llama.cpp has read is told again.")
    llama_log_s: float = bound(5.0, "s", "A load waits no longer for what its log has still to say.")
    llama_log_errors: int = bound(8, "lines", "Further errors in the log of a load are not told.")
    llama_prompt_block_bytes: int = bound(512, "bytes", "A shorter beginning of a prompt is not looked for in slots.")
    llama_prompt_blocks: int = bound(64, "blocks", "What comes later in a prompt is not looked for in slots.")
    llama_slots_s: float = bound(1.0, "s", "A flush takes slots for busy: a client that left is let go of sooner.")
    llama_probe_s: float = bound(20.0, "s", "A probe of what a foreign llama.cpp can flush has failed.")
    llama_probe_tokens: int = bound(
        2, "tokens", "Two random prompts share no more by chance; beyond it a probe sees a cache at work."
    )
    router_start_s: float = bound(30.0, "s", "A router that did not answer a load or unload has failed.")
    router_unload_s: float = bound(30.0, "s", "A router that still has the model has failed.")
    router_look_s: float = bound(0.2, "s", "A router is asked again.")

    tabby_load_s: float = bound(1800.0, "s", "A load with TabbyAPI has failed.")
    tabby_silence_s: float = bound(300.0, "s", "A load fails: the server, which pings between modules, hangs.")
    tabby_give_up_s: float = bound(120.0, "s", "A load that was cancelled is no longer waited for.")
    tabby_settle_s: float = bound(10.0, "s", "A load that was answered without a model in place has failed.")
    tabby_unload_s: float = bound(60.0, "s", "A server that still holds the model after it was told has failed.")
    tabby_unload_answer_s: float = bound(60.0, "s", "A server that did not answer an unload has failed.")
    tabby_poll_s: float = bound(0.5, "s", "The server is asked again.")

    server_load_s: float = bound(
        3600.0, "s", "A load with vLLM or TGI has failed; compiling can take tens of minutes the first time."
    )
    server_stop_s: float = bound(10.0, "s", "A server of vLLM or TGI that did not end is killed.")
    server_look_s: float = bound(0.2, "s", "A server of vLLM or TGI is asked again.")
    vllm_sleep_s: float = bound(300.0, "s", "A vLLM that did not fall asleep or wake has failed.")
    vllm_busy_s: float = bound(1.0, "s", "A flush of vLLM is refused: requests still run.")
    vllm_retry_s: float = bound(0.1, "s", "A flush of vLLM is tried again.")
    vllm_flush_s: float = bound(30.0, "s", "A flush of vLLM has failed.")
    vllm_epochs: int = bound(10_000, "scopes", "A flush of a further scope makes the whole cache of the model void.")
    vllm_cpu_kv_bytes: int = bound(512 * MIB, "bytes", "vLLM on a processor gets this cache, else it takes most of the memory.")
    vllm_overhead_bytes: int = bound(
        1024 * MIB, "bytes", "A budget leaves this on each GPU for activations, graphs and libraries."
    )
    tgi_error_bytes: int = bound(64 * 1024, "bytes", "A longer error of TGI is passed on without being read.")
    # TGI also finds the text of every token, in a time that grows with the square of the prompt.
    tgi_count_bytes: int = bound(128 * 1024, "bytes", "A token count on TGI gets 400.")
    tgi_lowest_port: int = bound(20_000, "port", "Ports of TGI are drawn from here up to those that the system gives.")
    tgi_port_tries: int = bound(100, "ports", "After so many draws the system chooses TGI's ports.")

    remote_connect_s: float = bound(10.0, "s", "A request fails: the provider takes no connection.")
    remote_silence_s: float = bound(
        120.0, "s", "A request fails: the provider says nothing, and the definition names no other limit."
    )
    remote_health_s: float = bound(5.0, "s", "A provider counts as silent.")
    remote_pause_first_s: float = bound(0.5, "s", "A refused request is tried again within this; the pause doubles each time.")
    remote_pause_max_s: float = bound(8.0, "s", "Pauses before another try grow no longer.")
    remote_retry_after_s: float = bound(30.0, "s", "What a provider asks to wait counts as no more.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLimits:
    """Replicas over several nodes."""

    members: int = bound(16, "nodes", "A load over more is refused.")
    join_s: float = bound(120.0, "s", "A load over several nodes fails: one of them did not join.", setting="MUSTER_JOIN_S")
    ray_s: float = bound(120.0, "s", "A load over several nodes fails: Ray did not start on one of them.")
    meet_s: float = bound(5.0, "s", "A connection between members that did not get to know each other is closed.")
    retry_s: float = bound(0.5, "s", "A head that does not answer is dialled again.")
    beat_s: float = bound(1.0, "s", "Members of a replica hear each other this often.")
    silent_s: float = bound(10.0, "s", "A replica ends: a member of it was not heard.", setting="MUSTER_MEMBER_SILENT_S")
    farewell_s: float = bound(1.0, "s", "A member that does not read is not told any more why the replica ends.")
    connections: int = bound(64, "connections", "A head hangs up on a further one.")
    notes: int = bound(8, "notes", "A replica ends: a member says more than there is to say.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComfyuiLimits:
    """ComfyUI: requests for images, their jobs, and its memory."""

    body_bytes: int = bound(4 * MIB, "bytes", "A request gets 413.")
    prompt_chars: int = bound(32_000, "characters", "A prompt or negative prompt gets 400.")
    images: int = bound(10, "images", "A request for more gets 400.")
    steps: int = bound(150, "steps", "A request for more gets 400.")
    cfg: float = bound(100.0, "scale", "A request for a higher guidance gets 400.")
    seed: int = bound(2**63 - 1, "number", "A higher seed gets 400.")
    pixels: int = bound(2048 * 2048, "pixels", "A request for a larger image gets 400.")
    workflow_bytes: int = bound(MIB, "bytes", "A load with a longer workflow fails.")
    workflow_nodes: int = bound(500, "nodes", "A load with a larger workflow fails.")

    job_s: float = bound(1800.0, "s", "A request whose images are not made gets 504 `engine_timeout`.")
    look_s: float = bound(3.0, "s", "The history is asked: the socket is silent.")
    look_without_socket_s: float = bound(0.5, "s", "The history is asked again: there is no socket.")
    look_at_end_s: float = bound(0.05, "s", "The history is asked again: the socket said that the job has ended.")
    silent_s: float = bound(30.0, "s", "A request gets 502: the server answers no question.")
    lost_s: float = bound(3.0, "s", "A request gets 502: its job is in no queue and not in the history either.")
    withdraw_s: float = bound(5.0, "s", "A job whose client has left is no longer withdrawn.")
    withdraw_poll_s: float = bound(0.1, "s", "The queue is asked again whether the job has left it.")
    stop_s: float = bound(10.0, "s", "Unloading waits no longer for requests.")

    connect_s: float = bound(5.0, "s", "A job goes on without a socket.")
    close_s: float = bound(0.2, "s", "A socket is closed without a farewell.")
    submit_s: float = bound(30.0, "s", "A job that was not taken has failed.")
    view_s: float = bound(60.0, "s", "An image that was not fetched has failed.")
    image_bytes: int = bound(64 * MIB, "bytes", "A larger image has failed.")
    message_bytes: int = bound(32 * MIB, "bytes", "A socket with a longer message is closed; previews come on it too.")
    said_chars: int = bound(400, "characters", "What the server says of a failure is cut.")

    nothing_bytes: int = bound(64 * MIB, "bytes", "A process that holds no more GPU memory has no model loaded.")
    free_s: float = bound(20.0, "s", "An unload fails: the GPU memory was not freed.")
    free_poll_s: float = bound(0.1, "s", "The GPU memory is read again.")
    steady_s: float = bound(1.0, "s", "Memory that has fallen and then stayed this long falls no further.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildrenLimits:
    """Programs of ours that hold an engine: they run as processes of their own and see the defaults."""

    unload_s: float = bound(5.0, "s", "CTranslate2 and whisper end without having freed their memory.")
    llama_unload_s: int = bound(1, "s", "llama.cpp is ended by SIGALRM.")
    waiting: int = bound(64, "requests", "A further request gets 503.")
    waiting_counts: int = bound(16, "requests", "A further token count gets 503.")
    body_bytes: int = bound(16 * MIB, "bytes", "A request gets 413.")
    results_ahead: int = bound(256, "results", "A worker waits for the client that reads its results.")
    slot_poll_s: float = bound(0.05, "s", "A worker that waits for its client looks whether it has left.")
    reading_poll_s: float = bound(0.25, "s", "How much of a model has been read is told again.")
    broken_tokens: int = bound(
        8, "tokens", "Bytes that make no character are written as they are; a character has at most four."
    )
    unknown_context_tokens: int = bound(2048, "tokens", "CTranslate2 takes this context where the model names none.")
    context_tokens: int = bound(
        10_000_000, "tokens", "A longer context means none: Hugging Face writes 10**30 where it knows none."
    )
    step_s: float = bound(60.0, "s", "ExLlamaV3 hangs: one step, prefill of a chunk included, takes far less.")
    step_poll_s: float = bound(0.2, "s", "The thread of ExLlamaV3 looks whether it is to end.")

    audio_s: int = bound(4 * 3600, "s", "A longer recording gets 400; decoded sound takes 64 kB a second.")
    audio_fields: int = bound(32, "fields", "A form with more fields gets 400.")
    audio_field_bytes: int = bound(16 * 1024, "bytes", "A longer field gets 400.")

    subreaper_poll_s: float = bound(0.2, "s", "A server is looked after again where no signal tells of the runner's end.")
    subreaper_rounds: int = bound(50, "rounds", "The subreaper leaves what it could not kill.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsLimits:
    """Settings of models, what is read of their files, and their downloads."""

    settings_bytes: int = bound(4 * MIB, "bytes", "A longer settings file is refused.")
    text_chars: int = bound(4096, "characters", "A longer text in the settings is refused.")
    id_chars: int = bound(200, "characters", "A longer id of a model is refused.")
    gpus: int = bound(64, "GPUs", "A load that names more GPUs, or a higher number of one, is refused.")
    shown_chars: int = bound(80, "characters", "A name or value is cut in a refusal.")

    discovery_s: float = bound(30.0, "s", "The folders of models are looked through again.")
    seek_s: float = bound(1.0, "s", "They are looked through again for a model that is not known.")
    folder_depth: int = bound(6, "folders", "Folders further down are not looked through.")
    folders: int = bound(5000, "folders", "Further folders are not looked through.")
    folder_entries: int = bound(5000, "entries", "A folder with more is of no use as a model.")
    found: int = bound(2000, "models", "Further models of a folder are not found; what was read of their files is forgotten.")
    parts: int = bound(1000, "files", "A GGUF file in more parts is not taken for one model.")
    files: int = bound(2000, "files", "A model in more safetensors files is corrupt; a download of more is refused.")
    side_bytes: int = bound(1 << 28, "bytes", "A larger file beside the weights is not downloaded.")

    chunk_bytes: int = bound(1 << 20, "bytes", "Headers are read in pieces of this size.")
    take_bytes: int = bound(1 << 20, "bytes", "A header with a longer item is corrupt.")
    walk_bytes: int = bound(1 << 28, "bytes", "A longer header is corrupt.")
    strings: int = bound(1 << 22, "strings", "A header with more strings is corrupt.")
    pairs: int = bound(1 << 16, "pairs", "A GGUF header with more pairs is corrupt.")
    tensors: int = bound(1 << 17, "tensors", "A header of GGUF or CTranslate2 with more tensors is corrupt.")
    kept_items: int = bound(1 << 12, "items", "A longer list or text of a GGUF header is passed over.")
    ct2_chunk_bytes: int = bound(1 << 12, "bytes", "Headers of CTranslate2 are read in pieces of this size.")
    ct2_name_bytes: int = bound(1 << 12, "bytes", "A CTranslate2 header with a longer name is corrupt.")
    safetensors_bytes: int = bound(1 << 25, "bytes", "A longer header or index of safetensors is corrupt.")
    config_bytes: int = bound(1 << 22, "bytes", "A longer config.json is corrupt.")
    layers: int = bound(4096, "layers", "A model with more is corrupt.")
    width: int = bound(1 << 24, "number", "A larger dimension is corrupt.")
    measured_loads: int = bound(20, "loads", "Older loads no longer count towards what an engine takes beside the model.")
    searched_models: int = bound(
        12, "models", "Of more loaded models, not every set is tried for eviction: the largest go first."
    )

    cached_repos: int = bound(2000, "repositories", "Further repositories of the hub's cache are not seen.")
    listed_files: int = bound(50_000, "files", "A repository with more is refused.")
    hub_connect_s: float = bound(10.0, "s", "A download breaks: the hub takes no connection.")
    hub_silence_s: float = bound(30.0, "s", "A download breaks: the hub sends nothing.")
    hub_pause_first_s: float = bound(0.5, "s", "A download that broke goes on; the pause doubles each time.")
    hub_search_s: float = bound(15.0, "s", "A search of the hub ends.")
    hub_search_bytes: int = bound(4 << 20, "bytes", "A longer answer of the hub to a search is not read.")
    hub_found: int = bound(20, "models", "A search of the hub finds no more.")
    hub_tries: int = bound(6, "tries", "A download that broke so often in a row without a byte has failed.")
    # What delivers files for the hub refuses whole files above 50 GB.
    hub_window_bytes: int = bound(1 << 34, "bytes", "A longer file is fetched in several requests.")
    hub_chunk_bytes: int = bound(1 << 20, "bytes", "Downloads are received and checked in pieces of this size.")
    reserve_bytes: int = bound(64_000_000, "bytes", "A download that would leave less on the disk is refused.")
    progress_gap_s: float = bound(0.2, "s", "The progress of a download is told no more often.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationsLimits:
    """Operations, tasks of loads, desired models, and the keys and policies that let them in."""

    tracked: int = bound(
        64, "operations", "A further command is refused with `unavailable`; of those that ended the oldest goes."
    )
    status_gap_s: float = bound(1.0, "s", "How an operation goes on is told no more often; a new stage and the end always are.")
    close_s: float = bound(10.0, "s", "What is being carried out when the runner ends is cut off.")
    loads: int = bound(8, "loads", "A further load gets 409.")
    task_save_gap_s: float = bound(1.0, "s", "Progress is written down no more often; a new stage and the end always are.")
    load_pause_first_s: float = bound(5.0, "s", "A desired model that did not load is loaded again.")
    load_pause_second_s: float = bound(30.0, "s", "It is loaded again a second time.")
    load_pause_last_s: float = bound(120.0, "s", "It is loaded again a last time until the runner starts anew.")
    # A model that takes the runner down with it must not do so for ever.
    unfinished: int = bound(3, "loads", "A desired model in whose load the runner ended so often in a row is not loaded again.")

    key_read_s: float = bound(10.0, "s", "An operation gets 503: the keys of tokens could not be read.")
    key_bytes: int = bound(4096, "bytes", "A longer file of a key is not taken.")
    keys: int = bound(16, "keys", "A folder with more keys is not taken.")
    op_keys: int = bound(8, "keys", "No further key of tokens is made until one has retired.")
    op_key_overlap_s: int = bound(
        86_400, "s", "A key retires after the next was made: tokens and control plane may be that late."
    )
    signed_life_s: int = bound(300, "s", "A token that the owner signed by hand expires.")
    word_chars: int = bound(20, "characters", "A word that is none of a fingerprint is cut in the refusal.")
    policies: int = bound(64, "policies", "Further policies of an offer are not looked at.")
    proof_hashes: int = bound(128, "hashes", "A checkpoint with a longer proof is refused.")
    note_chars: int = bound(8192, "characters", "A checkpoint with a longer note is refused.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketLimits:
    """Tickets that clients use on the node's own port."""

    body_s: float = bound(60.0, "s", "A request whose head came in time with its ticket is refused: its body took too long.")
    grace_s: float = bound(600.0, "s", "A used ticket is forgotten so long after it could be used; a clock may be set back.")
    reclaim_s: float = bound(10.0, "s", "A request with a ticket is cut, when the owner took the node back so long ago.")
    reports: int = bound(50, "reports", "Further reports go in another message.")
    report_s: float = bound(30.0, "s", "A report that no gateway has taken is sent again.")
    preflight_age_s: int = bound(600, "s", "A browser asks again whether its page may use the node.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsLimits:
    """The certificate of the node's own port."""

    renew_share: float = bound(1 / 3, "of its time", "A certificate with so little left is renewed.")
    look_s: float = bound(60.0, "s", "The certificate is looked at again, and so are files of the owner.")
    retry_s: float = bound(60.0, "s", "A certificate that did not come is asked for again.")
    placeholder_s: float = bound(3650 * 86_400.0, "s", "What the port shows before it is certified expires; nobody trusts it.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLimits:
    """The durable store of what the runner did."""

    busy_s: float = bound(5.0, "s", "A ledger that another process holds cannot be opened or read.")
    answer_s: float = bound(30.0, "s", "A disk that takes longer is treated as gone; what was asked counts as not done.")
    waiting: int = bound(1000, "jobs", "A further job is refused: the disk is too slow.")

    nonces: int = bound(50_000, "nonces", "A further token is refused: the ledger is full.")
    nonce_grace_s: float = bound(3600.0, "s", "A nonce is forgotten; a clock set back by less brings no token back.")
    ops: int = bound(50_000, "operations", "A further operation is refused; from half of it, ended ones are forgotten.")
    op_life_s: float = bound(30 * 86_400.0, "s", "An ended operation may be forgotten so long after its approval ended.")
    fences: int = bound(10_000, "slots", "An operation on a further slot is refused.")
    desired_models: int = bound(256, "models", "A load of a further desired model is refused.")

    tickets: int = bound(50_000, "tickets", "A further ticket is refused: no gateway takes reports.")
    ticket_report_s: float = bound(7 * 86_400.0, "s", "A report that no gateway took is dropped; its record has ended.")
    costs: int = bound(20_000, "requests", "The oldest costs that are settled are forgotten.")
    spendings: int = bound(100_000, "tenants and months", "A further tenant is refused.")
    spending_years: int = bound(2, "years", "Older sums are dropped.")
    amount_micros: int = bound(2**53, "millionths", "A larger amount is cut by the serving and refused by the ledger.")

    tasks: int = bound(1000, "tasks", "The oldest task that has ended is forgotten.")
    observations: int = bound(5000, "loads", "What the oldest load took is forgotten.")
    observations_of_plan: int = bound(20, "loads", "What the oldest load of a model and plan took is forgotten.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """All limits of one process."""

    api: ApiLimits = field(default_factory=ApiLimits)
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    connection: ConnectionLimits = field(default_factory=ConnectionLimits)
    serving: ServingLimits = field(default_factory=ServingLimits)
    engines: EnginesLimits = field(default_factory=EnginesLimits)
    cluster: ClusterLimits = field(default_factory=ClusterLimits)
    comfyui: ComfyuiLimits = field(default_factory=ComfyuiLimits)
    children: ChildrenLimits = field(default_factory=ChildrenLimits)
    models: ModelsLimits = field(default_factory=ModelsLimits)
    operations: OperationsLimits = field(default_factory=OperationsLimits)
    tickets: TicketLimits = field(default_factory=TicketLimits)
    tls: TlsLimits = field(default_factory=TlsLimits)
    ledger: LedgerLimits = field(default_factory=LedgerLimits)


_current = Limits()


def limits() -> Limits:
    """Return the limits of this process."""
    return _current


def install(chosen: Limits) -> Limits:
    """Let ``chosen`` hold from now on; return what held before. The runner does it at its start, and tests."""
    global _current
    before, _current = _current, chosen
    return before

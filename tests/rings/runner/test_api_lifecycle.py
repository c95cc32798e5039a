"""The model-runner API of the real program with the real llama.cpp: a model's whole life, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from runner.config.reading import TINY_MODEL_PATH
from tests.fakes.runners.process import ApiBox, run_api_box
from wire.optoken import Operation

pytestmark = pytest.mark.timeout(180)

LONG = "Explain the gateway and how it works in detail please. " * 8
SPEC_NUMBERS = {"x-cache-hit", "x-cache-tokens-reused", "x-queue-wait-ms", "x-gpu-time-ms"}


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiBox]:
    """One box for the tests of this file; each leaves nothing loaded that it did not ensure."""
    folder = tmp_path_factory.mktemp("api")
    with run_api_box(folder, models=("a", "b", "team/c")) as running:
        yield running


def chat(box: ApiBox, model: str, text: str = LONG, **more: Any) -> httpx.Response:
    headers = more.pop("headers", {})
    body = {"model": model, "max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": text}], **more}
    return box.client.post("/v1/chat/completions", json=body, headers=headers)


def test_a_load_is_polled_until_it_is_completed_and_repeated_loads_change_nothing(box: ApiBox) -> None:
    box.ensure_unloaded("a")
    reply = box.load("a")
    assert reply.status_code == 202
    task = reply.json()
    assert (task["status"], task["progress"], task["modelId"]) == ("loading", 0.0, "a")
    assert "eta" in task
    again = box.load("a")
    assert again.json()["taskId"] == task["taskId"]
    done = box.finish_load(reply)
    assert (done["status"], done["modelId"]) == ("completed", "a")
    for name in ("gpuMemoryUsedMB", "predictedMemoryMB", "loadTimeMs"):
        value = done[name]
        assert isinstance(value, int)
        assert value > 0
    third = box.load("a")
    assert (third.status_code, third.json()["alreadyLoaded"], third.json()["taskId"]) == (200, True, task["taskId"])


def test_capabilities_has_every_field_of_the_specification(box: ApiBox) -> None:
    box.ensure_loaded("a")
    box.ensure_unloaded("b")
    reply = box.client.get("/v1/capabilities")
    assert reply.headers["cache-control"] == "max-age=5"
    body = reply.json()
    assert body["runnerVersion"].startswith("muster-")
    assert body["runnerId"]
    loaded = {entry["id"]: entry for entry in body["models"]["loaded"]}["a"]
    assert loaded["quantization"] == "q8_0"
    assert loaded["contextLength"] >= 512
    assert loaded["loadedAt"] > 1_700_000_000
    assert loaded["gpuMemoryMB"] > 0
    assert loaded["engine"] == f"llamacpp-{version('xllamacpp')}", "this package knows no build of llama.cpp"
    assert body["runnerType"] == loaded["engine"]
    assert "/v1/chat/completions" in loaded["endpoints"]
    assert body["models"]["loading"] == []
    assert {"b", "team/c"} <= set(body["models"]["available"])
    resources = body["resources"]
    assert resources["gpuMemoryTotalMB"] > 0
    assert resources["gpuMemoryUsedMB"] + resources["gpuMemoryFreeMB"] == resources["gpuMemoryTotalMB"]
    assert {"gpuIds", "gpuUtilization", "kvCacheSizeMB", "kvCacheUtilization", "device", "gpus"} <= set(resources)
    assert body["queue"] == {"depth": 0, "maxDepth": 16, "avgWaitMs": body["queue"]["avgWaitMs"], "p95WaitMs": 0}
    assert body["capabilities"] == {
        "streaming": True, "prefixCaching": True, "multiTenant": True, "visionInput": False, "audioInput": False,
        "functionCalling": False,
    }  # fmt: skip
    assert body["health"] == "healthy"


def test_a_chat_reply_has_the_headers_of_the_specification_from_real_numbers(box: ApiBox) -> None:
    box.ensure_loaded("a")
    assert box.flush("all").status_code == 200
    cold = chat(box, "a", headers={"X-Tenant-ID": "t1", "X-Request-ID": "call-1"})
    assert cold.status_code == 200
    assert set(cold.headers) >= SPEC_NUMBERS
    assert cold.headers["x-request-id"] == "call-1"
    assert (cold.headers["x-cache-hit"], cold.headers["x-cache-tokens-reused"]) == ("false", "0")
    warm = chat(box, "a", headers={"X-Tenant-ID": "t1", "X-Cache-Mode": "prefix", "X-Priority": "high"})
    assert warm.headers["x-cache-hit"] == "true"
    reused = int(warm.headers["x-cache-tokens-reused"])
    assert reused == warm.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 50
    other = chat(box, "a", headers={"X-Tenant-ID": "t2"})
    assert other.headers["x-cache-hit"] == "false"


def test_models_are_listed_for_openai_and_for_llm_pool(box: ApiBox) -> None:
    box.ensure_loaded("a")
    body = box.client.get("/v1/models").json()
    assert body["object"] == "list"
    assert "a" in [entry["id"] for entry in body["data"]]
    assert body["models"] == [entry["id"] for entry in body["data"]]
    assert box.client.get("/v1/models/a").json()["object"] == "model"
    assert box.client.get("/v1/models/nobody").status_code == 404


def test_an_unload_gives_the_memory_back_and_then_refuses_requests(box: ApiBox) -> None:
    box.ensure_loaded("a")
    body = box.unload("a").json()
    assert body["modelId"] == "a"
    assert body["kvCacheFlushed"] is True
    assert body["gpuMemoryFreedMB"] == body["memoryBeforeMB"] > 0
    assert body["memoryAfterMB"] == 0
    refused = chat(box, "a")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_not_loaded")
    assert set(refused.headers) >= SPEC_NUMBERS
    again = box.unload("a")
    assert (again.status_code, again.json()["wasLoaded"]) == (200, False)


@pytest.mark.parametrize(
    ("fields", "status", "code", "param", "words"),
    [
        ({"modelId": "nobody"}, 404, "unknown_model", None, "nobody"),
        ({"modelId": "b", "evictModel": "nobody"}, 404, "unknown_model", None, "nobody"),
        ({"modelId": "b", "overrides": {"gguf_n_ctx": 0}}, 400, "invalid_load_request", "gguf_n_ctx", "at least 1"),
        ({"modelId": "b", "overrides": {"vllm_max_model_len": 512}}, 400, "invalid_load_request", "vllm_max_model_len", "gguf"),
        ({"modelId": "b", "quantization": "awq-4bit"}, 400, "invalid_load_request", "quantization", "awq-4bit"),
        ({"modelId": "b", "maxContextLength": "many"}, 400, "invalid_request", "maxContextLength", "int"),
        ({"modelId": "b", "contextLength": 5}, 400, "invalid_request", "contextLength", "contextLength"),
        ({}, 400, "invalid_request", "modelId", "modelId"),
    ],
)
def test_a_load_that_cannot_be_is_refused_by_name(
    box: ApiBox, fields: dict[str, object], status: int, code: str, param: str | None, words: str
) -> None:
    body = {**fields, "verifiedOpToken": box.token(Operation.MODEL_LOAD, str(fields.get("modelId")))}
    reply = box.client.post("/v1/models/load", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (status, code, param)
    assert words in error["message"]
    assert error["retryable"] is False


def test_operations_without_a_good_token_are_refused_in_the_same_words(box: ApiBox) -> None:
    spent = box.token(Operation.MODEL_LOAD, "b")
    assert box.client.post("/v1/models/load", json={"modelId": "b", "verifiedOpToken": spent}).status_code in {200, 202}
    tokens: list[object] = [
        None, "", {}, "eyJ", spent, box.token(Operation.MODEL_UNLOAD, "b"), box.token(Operation.MODEL_LOAD, "a"),
        box.token(Operation.MODEL_LOAD, "b", signers=("ann", "ann")),
        {**box.token(Operation.MODEL_LOAD, "b"), "signature": "0" * 64},
    ]  # fmt: skip
    refusals = [box.client.post("/v1/models/load", json={"modelId": "b", "verifiedOpToken": token}) for token in tokens]
    refusals.append(box.client.post("/v1/models/unload", json={"modelId": "b"}))
    refusals.append(box.client.post("/v1/cache/flush", json={"scope": "all"}))
    refusals.append(box.client.post("/v1/admin/models/b/load", json={}))
    assert {reply.status_code for reply in refusals} == {403}
    assert {reply.json()["error"]["message"] for reply in refusals[:-1]} == {refusals[-1].json()["detail"]["message"]}
    box.finish_load(box.load("b"))
    box.ensure_unloaded("b")


def test_bodies_that_are_no_good_are_refused_with_what_is_wrong(box: ApiBox) -> None:
    def post(path: str, body: bytes, media_type: str = "application/json") -> tuple[int, str]:
        reply = box.client.post(path, content=body, headers={"content-type": media_type})
        return reply.status_code, reply.json()["error"]["message"]

    for path in ("/v1/models/load", "/v1/chat/completions"):
        assert post(path, b'{"model":"a","model":"b"}') == (
            400,
            "The request body is not valid JSON: an object has the same name twice.",
        )
        assert post(path, b'{"model":NaN}')[0] == 400
        assert post(path, b"[" * 100_000)[0] == 400
        assert post(path, b'{"model":"a"}', "text/plain")[0] == 415
    assert post("/v1/models/load", b"[]")[1] == "The request body must be a JSON object."
    assert post("/v1/models/load", b" " * (8 << 20) + b"{}")[0] == 413
    assert post("/v1/chat/completions", b'{"messages":[]}')[1] == "Invalid request body: Object missing required field `model`."
    wrong = box.client.post("/v1/chat/completions", json={"model": "a"}, headers={"X-Priority": "urgent"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "X-Priority")


def test_unknown_paths_and_methods_are_refused_in_json(box: ApiBox) -> None:
    missing = box.client.get("/v2/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = box.client.get("/v1/models/load")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert box.client.put("/v1/capabilities").headers["allow"] == "GET, HEAD"
    assert box.client.get("/v1/models/load/load-nothing").json()["error"]["code"] == "unknown_task"


def test_a_damaged_file_is_named_and_does_not_load(box: ApiBox) -> None:
    for name in ("a", "b", "team/c"):
        box.ensure_unloaded(name)
    folder = box.log.parent / "models"
    (folder / "cut.gguf").write_bytes(TINY_MODEL_PATH.read_bytes()[:3000])
    # A header in order and an architecture that no engine knows: only the engine itself finds out.
    (folder / "strange.gguf").write_bytes(TINY_MODEL_PATH.read_bytes().replace(b"llama", b"lxama"))
    try:
        # The files are looked through for an unknown name, at most once a second.
        error = box.wait_for(lambda: box.load("cut").json()["error"], lambda error: error["code"] != "unknown_model")
        assert error["code"] == "model_failed"
        assert "cut.gguf is damaged" in str(error["message"])
        task = box.finish_load(box.load("strange"))
        assert (task["status"], task["code"]) == ("failed", "model_load_failed")
        assert "lxama" in str(task["error"])
        pool = box.client.post(
            "/v1/admin/models/strange/load", json={"verifiedOpToken": box.token(Operation.MODEL_LOAD, "strange")}
        )
        assert (pool.status_code, pool.json()["detail"]["code"]) == (500, "model_load_failed")
        assert "lxama" in pool.json()["detail"]["message"]
        models = box.client.get("/v1/capabilities").json()["models"]
        assert [entry["id"] for entry in models["failed"]] == ["strange"]
        health = box.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "unhealthy")
        assert health.json()["reasons"][0].startswith("no model serves, strange failed: ")
        box.ensure_loaded("a")
        assert box.client.get("/health").json().keys() == {"status", "uptime", "modelsLoaded", "queueDepth"}
    finally:
        (folder / "cut.gguf").unlink()
        (folder / "strange.gguf").unlink()


def test_metrics_are_prometheus_text_with_the_names_of_the_specification(box: ApiBox) -> None:
    box.ensure_loaded("a")
    assert chat(box, "a", headers={"X-Tenant-ID": "metered"}).status_code == 200
    reply = box.client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(reply.text)}
    counted = [
        sample.value for sample in families["vllm_requests"].samples
        if sample.labels == {"model": "a", "tenant": "metered", "status": "success"}
    ]  # fmt: skip
    assert counted == [1.0]
    assert {"vllm_cache_hit_rate", "vllm_queue_depth", "vllm_gpu_memory_used", "vllm_inference_duration_seconds"} <= set(
        families
    )
    mine = [s for s in families["llamacpp:tokens_predicted"].samples if s.labels == {"model": "a", "replica": "0"}]
    assert [sample.value > 0 for sample in mine] == [True], "what the engine counts itself"
    durations = [s for s in families["vllm_inference_duration_seconds"].samples if s.name.endswith("_count")]
    assert all(sample.value >= 1 for sample in durations if sample.labels == {"model": "a"})
    held = {s.labels["kind"]: s.value for s in families["muster_runner_model_memory_bytes"].samples if s.labels["model"] == "a"}
    assert held["total"] > held["weights"] + held["kv"] > 0
    states = {s.labels["state"]: s.value for s in families["muster_runner_model_state"].samples if s.labels["model"] == "a"}
    assert states == {"unloaded": 0, "loading": 0, "loaded": 1, "unloading": 0, "failed": 0}


def test_llm_pools_admin_lists_loads_and_unloads_with_its_own_words(box: ApiBox) -> None:
    box.ensure_unloaded("team/c")
    token = box.token(Operation.MODEL_LOAD, "team/c")
    path = "/v1/admin/models/team/c"
    row = box.client.post(f"{path}/load", json={"gguf_n_ctx": 768, "gguf_type_k": None, "verifiedOpToken": token})
    refused = row.json()["detail"]
    assert (row.status_code, refused["code"], refused["model"]) == (400, "invalid_load_request", "team/c")
    row = box.client.post(f"{path}/load", json={"gguf_n_ctx": 768, "verifiedOpToken": token})
    body = row.json()
    assert (row.status_code, body["runtime_state"], body["is_loaded"]) == (200, "loaded", True)
    assert body["load_override"] == {"gguf_n_ctx": 768}
    assert (body["replicas"], body["loaded_replicas"], body["effective_target_inflight"]) == (1, 1, 1)
    assert body["vram_estimate_source"] == "observed_load_delta"
    assert body["load_constraints"]["gguf_type_k"]["allowed_values"][0] == "f32"
    assert body["load_recommendations"]["kv_cache"]["recommended_pairs"][0]["gguf_type_k"] == "f16"
    listed = {entry["name"]: entry for entry in box.client.get("/v1/admin/models").json()["models"]}
    assert listed["team/c"].keys() == body.keys()
    for context, expected in ((768, (200, None)), (512, (409, "load_conflict"))):
        token = box.token(Operation.MODEL_LOAD, "team/c")
        again = box.client.post(f"{path}/load", json={"gguf_n_ctx": context, "verifiedOpToken": token})
        assert (again.status_code, again.json().get("detail", {}).get("code")) == expected
    memory = box.client.get("/v1/admin/gpu-memory").json()
    assert {"gpus", "models", "error"} == set(memory)
    gone = box.client.post(f"{path}/unload", json={"verifiedOpToken": box.token(Operation.MODEL_UNLOAD, "team/c")})
    assert (gone.status_code, gone.json()["runtime_state"], gone.json()["load_override"]) == (200, "unloaded", {})
    unknown = box.client.post("/v1/admin/models/nobody/unload", json={"verifiedOpToken": token})
    assert (unknown.status_code, unknown.json()["detail"]["code"]) == (404, "unknown_model")

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


def test_a_load_is_polled_until_it_is_completed_and_an_unload_gives_the_memory_back(box: ApiBox) -> None:
    box.ensure_unloaded("a")
    reply = box.load("a")
    task = reply.json()
    assert (reply.status_code, task["status"], task["progress"], task["modelId"]) == (202, "loading", 0.0, "a")
    assert box.load("a").json()["taskId"] == task["taskId"]
    done = box.finish_load(reply)
    assert (done["status"], done["modelId"]) == ("completed", "a")
    assert all(isinstance(done[name], int) and done[name] for name in ("gpuMemoryUsedMB", "predictedMemoryMB", "loadTimeMs"))
    again = box.load("a")
    assert (again.status_code, again.json()["alreadyLoaded"], again.json()["taskId"]) == (200, True, task["taskId"])
    listed = box.client.get("/v1/models").json()
    assert ("a" in listed["models"], listed["models"]) == (True, [entry["id"] for entry in listed["data"]])
    gone = box.unload("a").json()
    assert (gone["modelId"], gone["kvCacheFlushed"], gone["memoryAfterMB"]) == ("a", True, 0)
    assert gone["gpuMemoryFreedMB"] == gone["memoryBeforeMB"] > 0
    refused = chat(box, "a")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_not_loaded")
    assert set(refused.headers) >= SPEC_NUMBERS
    assert box.unload("a").json()["wasLoaded"] is False


def test_capabilities_has_every_field_of_the_specification(box: ApiBox) -> None:
    box.ensure_loaded("a")
    box.ensure_unloaded("b")
    reply = box.client.get("/v1/capabilities")
    assert reply.headers["cache-control"] == "max-age=5"
    body = reply.json()
    assert (body["runnerVersion"].startswith("muster-"), body["health"]) == (True, "healthy")
    loaded = {entry["id"]: entry for entry in body["models"]["loaded"]}["a"]
    assert (loaded["quantization"], loaded["contextLength"] >= 512, loaded["gpuMemoryMB"] > 0) == ("q8_0", True, True)
    assert body["runnerType"] == loaded["engine"] == f"llamacpp-{version('xllamacpp')}"
    assert body["models"]["loading"] == []
    assert {"b", "team/c"} <= set(body["models"]["available"])
    resources = body["resources"]
    assert resources["gpuMemoryUsedMB"] + resources["gpuMemoryFreeMB"] == resources["gpuMemoryTotalMB"] > 0
    assert {"gpuIds", "gpuUtilization", "kvCacheSizeMB", "kvCacheUtilization", "device", "gpus"} <= set(resources)
    assert body["queue"] == {"depth": 0, "maxDepth": 16, "avgWaitMs": body["queue"]["avgWaitMs"], "p95WaitMs": 0}
    assert {name for name, has in body["capabilities"].items() if has} == {"streaming", "prefixCaching", "multiTenant"}


def test_a_chat_reply_has_the_headers_of_the_specification_from_real_numbers(box: ApiBox) -> None:
    box.ensure_loaded("a")
    assert box.flush("all").status_code == 200
    cold = chat(box, "a", headers={"X-Tenant-ID": "t1", "X-Request-ID": "call-1"})
    assert (cold.status_code, cold.headers["x-request-id"], set(cold.headers) >= SPEC_NUMBERS) == (200, "call-1", True)
    warm = chat(box, "a", headers={"X-Tenant-ID": "t1", "X-Cache-Mode": "prefix", "X-Priority": "high"})
    reused = int(warm.headers["x-cache-tokens-reused"])
    assert reused == warm.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 50
    other = chat(box, "a", headers={"X-Tenant-ID": "t2"})
    assert [reply.headers["x-cache-hit"] for reply in (cold, warm, other)] == ["false", "true", "false"]


def test_a_load_that_cannot_be_is_refused_by_name(box: ApiBox) -> None:
    cases: list[tuple[dict[str, object], int, str, str | None]] = [
        ({"modelId": "nobody"}, 404, "unknown_model", None),
        ({"modelId": "b", "evictModel": "nobody"}, 404, "unknown_model", None),
        ({"modelId": "b", "overrides": {"gguf_n_ctx": 0}}, 400, "invalid_load_request", "gguf_n_ctx"),
        ({"modelId": "b", "maxContextLength": "many"}, 400, "invalid_request", "maxContextLength"),
        ({"modelId": "b", "contextLength": 5}, 400, "invalid_request", "contextLength"),
    ]
    for fields, status, code, param in cases:
        body = {**fields, "verifiedOpToken": box.token(Operation.MODEL_LOAD, str(fields.get("modelId")))}
        reply = box.client.post("/v1/models/load", json=body)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"], error["retryable"]) == (status, code, param, False)


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


def test_bodies_paths_and_methods_that_are_no_good_are_refused_in_json(box: ApiBox) -> None:
    def post(path: str, body: bytes, media_type: str = "application/json") -> tuple[int, str]:
        reply = box.client.post(path, content=body, headers={"content-type": media_type})
        return reply.status_code, reply.json()["error"]["message"]

    for path in ("/v1/models/load", "/v1/chat/completions"):
        twice = "The request body is not valid JSON: an object has the same name twice."
        assert post(path, b'{"model":"a","model":"b"}') == (400, twice)
        assert post(path, b"[" * 100_000)[0] == 400
        assert post(path, b'{"model":"a"}', "text/plain")[0] == 415
    assert post("/v1/models/load", b" " * (8 << 20) + b"{}")[0] == 413
    wrong = box.client.post("/v1/chat/completions", json={"model": "a"}, headers={"X-Priority": "urgent"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "X-Priority")
    for path, status, code in (("/v2/nothing", 404, "not_found"), ("/v1/models/load/load-nothing", 404, "unknown_task")):
        missing = box.client.get(path)
        assert (missing.status_code, missing.json()["error"]["code"]) == (status, code)
    assert box.client.get("/v1/models/load").headers["allow"] == "POST"


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
    families = {family.name: family for family in text_string_to_metric_families(box.client.get("/metrics").text)}

    def shown(family: str, **labels: str) -> list[float]:
        return [sample.value for sample in families[family].samples if labels.items() <= sample.labels.items()]

    assert shown("vllm_requests", model="a", tenant="metered", status="success") == [1.0]
    assert {"vllm_cache_hit_rate", "vllm_queue_depth", "vllm_gpu_memory_used", "vllm_inference_duration_seconds"} <= set(
        families
    )
    assert all(value > 0 for value in shown("llamacpp:tokens_predicted", model="a", replica="0")), (
        "what the engine counts itself"
    )
    (total,), (weights,), (kv,) = (
        shown("muster_runner_model_memory_bytes", model="a", kind=k) for k in ("total", "weights", "kv")
    )
    assert total > weights + kv > 0
    assert shown("muster_runner_model_state", model="a", state="loaded") == [1]


def test_llm_pools_admin_lists_loads_and_unloads_with_its_own_words(box: ApiBox) -> None:
    box.ensure_unloaded("team/c")
    token, path = box.token(Operation.MODEL_LOAD, "team/c"), "/v1/admin/models/team/c"
    row = box.client.post(f"{path}/load", json={"gguf_n_ctx": 768, "gguf_type_k": None, "verifiedOpToken": token})
    refused = row.json()["detail"]
    assert (row.status_code, refused["code"], refused["model"]) == (400, "invalid_load_request", "team/c")
    row = box.client.post(f"{path}/load", json={"gguf_n_ctx": 768, "verifiedOpToken": token})
    body = row.json()
    assert (row.status_code, body["runtime_state"], body["is_loaded"]) == (200, "loaded", True)
    assert (body["replicas"], body["loaded_replicas"], body["load_override"]) == (1, 1, {"gguf_n_ctx": 768})
    assert body["load_constraints"]["gguf_type_k"]["allowed_values"][0] == "f32"
    assert body["load_recommendations"]["kv_cache"]["recommended_pairs"][0]["gguf_type_k"] == "f16"
    listed = {entry["name"]: entry for entry in box.client.get("/v1/admin/models").json()["models"]}
    assert listed["team/c"].keys() == body.keys()
    fresh = {"gguf_n_ctx": 512, "verifiedOpToken": box.token(Operation.MODEL_LOAD, "team/c")}
    again = box.client.post(f"{path}/load", json=fresh)
    assert (again.status_code, again.json()["detail"]["code"]) == (409, "load_conflict")
    assert {"gpus", "models", "error"} == set(box.client.get("/v1/admin/gpu-memory").json())
    gone = box.client.post(f"{path}/unload", json={"verifiedOpToken": box.token(Operation.MODEL_UNLOAD, "team/c")})
    assert (gone.status_code, gone.json()["runtime_state"], gone.json()["load_override"]) == (200, "unloaded", {})

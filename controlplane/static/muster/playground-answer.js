// One question and its answer, from Send to the last byte or Stop, and what the request's record says afterwards.
import { blameField, post, say } from "./playground-form.js";
import { Answer, EventCutter } from "./playground-stream.js";

const root = document.getElementById("playground");
const find = (name) => document.getElementById(`pg-${name}`);
const fact = (name) => root.querySelector(`[data-fact="${name}"]`);
const rawLimit = 256 * 1024;
const looksMs = [0, 250, 500, 1000, 2000, 4000, 8000, 16000]; // a busy database writes the record late
const askWhyMs = 2000;
const keyAdvice = "A key that this page made was revoked: send again, and it makes another. A key of your own: check it.";

// What to do about an error that the gateway names. Without an entry its own words must do.
const advice = {
    NO_AVAILABLE_NODE: "Choose a model that a node serves, or look under Nodes why no node takes work.",
    NODE_DRAINING: "Undrain a node under Nodes, or choose another model.",
    MODEL_NOT_ALLOWED: "Allow the model under Models, or choose another one.",
    INVALID_API_KEY: keyAdvice,
    invalid_api_key: keyAdvice,
    authentication_error: keyAdvice,
    RATE_LIMITED: "Wait a moment, then send again. The limit stands under Tenants.",
    PROMPT_TOO_LARGE: "Shorten the prompt, or choose a model with a larger window.",
    context_length_exceeded: "Shorten the prompt or lower Max tokens, or choose a model with a larger window.",
    MAX_TOKENS_TOO_LARGE: "Lower Max tokens.",
    REQUEST_TIMEOUT: "Every node was busy, or the model is slow. Send again, or ask for fewer tokens.",
    FORWARDED_REQUEST_FAILED: "The engine on the node failed; the log of the node says why.",
    REQUEST_INTERRUPTED: "The node went away in the middle. Send again.",
};
let latest = null;

const printTime = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`);

const setFact = (name, value) => {
    if (value !== null && value !== undefined && value !== "") {
        fact(name).textContent = String(value);
    }
};

const showProblem = (what, whatToDo = "") => {
    find("problem-what").textContent = what;
    find("problem-advice").textContent = whatToDo;
    find("problem").hidden = false;
};

const clear = () => {
    for (const name of ["problem", "reasoning", "text", "calls-part", "raw", "empty"]) {
        find(name).hidden = true;
    }
    for (const name of ["text", "reasoning-text", "raw-text"]) {
        find(name).textContent = "";
    }
    find("calls").replaceChildren();
    for (const place of root.querySelectorAll("[data-fact]")) {
        place.textContent = "–";
    }
    fact("ignored").parentElement.hidden = true;
};

// Appends what has grown instead of writing it anew: a selection survives, and long answers stay quick.
const growText = (element, text) => {
    const shown = element.firstChild?.length ?? 0;
    if (element.firstChild) {
        element.firstChild.appendData(text.slice(shown));
    } else {
        element.textContent = text;
    }
};

const printArguments = (text) => {
    try {
        return JSON.stringify(JSON.parse(text), null, 2);
    } catch {
        return text;
    }
};

const showCalls = (calls) => {
    const list = find("calls");
    calls.forEach((call, place) => {
        const item = list.children[place] ?? list.appendChild(document.createElement("li"));
        if (item.childElementCount === 0) {
            item.append(...["strong", "code", "pre"].map((name) => document.createElement(name)));
        }
        [call.name || "…", call.id, printArguments(call.text)].forEach((text, part) => {
            item.children[part].textContent = text;
        });
    });
};

const printVector = (vector) => {
    if (typeof vector === "string") {
        return say("{count} characters of base64: {text}…", { count: vector.length, text: vector.slice(0, 120) });
    }
    const first = vector.slice(0, 8).map((value) => Number(value).toFixed(5));
    return say("{count} numbers: {text}", { count: vector.length, text: `[${first.join(", ")}${vector.length > 8 ? ", …" : ""}]` });
};

class Run {
    #began = performance.now();
    #first = null;
    #last = null;
    #raw = "";
    #isPainting = false;
    #isRefused = false;
    #isOver = false;
    #record = "";
    #requestId = "";
    #given = null; // what the node was asked with
    #whyRelayed = "";

    constructor(fields, signal) {
        this.fields = fields;
        this.signal = signal;
        this.answer = new Answer(fields.surface);
    }

    async go() {
        try {
            const response = (this.fields.ticket && (await this.#askNode())) || (await this.#askGateway());
            this.#readHead(response);
            const isStream = response.headers.get("content-type")?.startsWith("text/event-stream");
            await (isStream ? this.#readStream(response) : this.#readWhole(response));
        } catch (error) {
            if (!this.signal.aborted) {
                showProblem(
                    this.#given === null ? say("The connection to the control plane broke off.") : say("The connection to the node broke off."),
                    say("Check the network, then send again ({name}).", { name: error.name }),
                );
            }
        }
        this.#paint();
        this.#finish();
    }

    #askGateway() {
        setFact("way", this.#whyRelayed === "" ? say("the gateway") : this.#whyRelayed);
        return post(root.dataset.send, this.fields, this.signal);
    }

    // Returns the answer of a node that was asked with a ticket, or a refusal; null where the gateway is to be asked.
    async #askNode() {
        const response = await post(root.dataset.ticket, this.fields, this.signal);
        if (!response.ok) {
            setFact("way", say("the gateway, for a ticket"));
            return response;
        }
        const given = await response.json();
        if (given.relay) {
            this.#whyRelayed = say("The gateway, because no node that clients reach has the model and a free slot.");
            return null;
        }
        const { host, protocol } = new URL(given.url);
        if (protocol !== location.protocol && location.protocol === "https:") {
            this.#whyRelayed = say("The gateway, because browsers let no page of https ask {host} by http. Give the node a --ticket-url of https.", { host });
            return null;
        }
        try {
            const answer = await fetch(given.url, {
                method: "POST",
                headers: { "Content-Type": "application/json", Authorization: `Bearer ${given.ticket}` },
                body: JSON.stringify(given.body),
                credentials: "omit",
                signal: this.signal,
            });
            this.#given = given;
            setFact("way", say("the node itself, at {host}", { host }));
            return answer;
        } catch (error) {
            if (this.signal.aborted) {
                throw error;
            }
            const origins = `--ticket-origins ${location.origin}`;
            this.#whyRelayed = say(
                "The gateway, because this browser got no answer from {host}. Start that node with {origins}, see that this machine reaches it and trusts its certificate, and reload this page if the node is new.",
                { host, origins },
            );
            return null;
        }
    }

    #readHead(response) {
        const header = (name) => response.headers.get(name) ?? "";
        this.#requestId = this.#given?.request ?? header("x-request-id");
        this.#record = this.#given?.record ?? header("x-playground-record");
        setFact("model", this.#given?.model);
        setFact("node", header("x-muster-node"));
        setFact("model", header("x-muster-model"));
        setFact("queue", header("x-queue-wait-ms") && printTime(Number(header("x-queue-wait-ms"))));
        setFact("ignored", header("x-muster-ignored"));
        fact("ignored").parentElement.hidden = header("x-muster-ignored") === "";
        if (this.#requestId !== "") {
            const shown = document.createElement(this.#record === "" ? "code" : "a");
            shown.textContent = this.#requestId;
            if (this.#record !== "") {
                shown.href = this.#record;
                shown.className = "mst-link";
            }
            fact("request").replaceChildren(shown);
        }
    }

    async #readStream(response) {
        const cutter = new EventCutter();
        const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
        for (;;) {
            const { done, value } = await reader.read();
            if (done) {
                break;
            }
            this.#keepRaw(value);
            const before = this.answer.pieces;
            cutter.feed(value).forEach((event) => this.answer.takeEvent(event));
            if (this.answer.pieces > before) {
                this.#noteContent();
            }
            this.#paintSoon();
        }
        if (this.answer.error !== null) {
            this.#sayError(response);
        } else if (!this.answer.isEnded) {
            showProblem(say("The answer broke off before its end."), say("The page of the request says more. Send again."));
        }
    }

    async #readWhole(response) {
        const body = await response.text();
        this.#keepRaw(body);
        const isRead = this.answer.takeWhole(body);
        if (this.answer.error !== null) {
            this.#sayError(response);
        } else if (!isRead && response.headers.get("content-type")?.startsWith("text/html")) {
            showProblem(
                say("The control plane answered {status}.", { status: response.status }),
                say("Reload this page; you may have been signed out."),
            );
        } else if (!isRead || !response.ok) {
            showProblem(
                say("The gateway answered {status} and nothing that can be read.", { status: response.status }),
                say("It stands below, as it came."),
            );
        } else {
            this.#last = performance.now();
        }
    }

    // The control plane's own refusals are about the form; the gateway's have a request, and may name a field as well.
    #sayError(response) {
        const { message, code, param } = this.answer.error;
        const isOurs = this.#requestId === "";
        const isBlamed = response.status < 500 && blameField(param, message, { isFocused: isOurs });
        if (isOurs && isBlamed) {
            this.#isRefused = true;
            return;
        }
        const wait = response.headers.get("retry-after");
        showProblem(message, (advice[code] ? say(advice[code]) : "") + (wait === null ? "" : ` ${say("The gateway asks to wait for {wait} s.", { wait })}`));
        if (isOurs && response.status === 401) {
            const link = Object.assign(document.createElement("a"), { href: root.dataset.signIn, className: "mst-link" });
            link.textContent = say("Sign in");
            find("problem-advice").append(link);
        }
    }

    #keepRaw(text) {
        const room = rawLimit - this.#raw.length;
        if (room > 0) {
            this.#raw += text.length < room ? text : `${text.slice(0, room)}\n${say("… the rest is not kept.")}`;
        }
    }

    #noteContent() {
        this.#last = performance.now();
        if (this.#first === null) {
            this.#first = this.#last;
            setFact("first", printTime(this.#first - this.#began));
            find("status").textContent = say("Answering…");
        }
    }

    #paintSoon() {
        if (!this.#isPainting) {
            this.#isPainting = true;
            requestAnimationFrame(() => this.#paint());
        }
    }

    #paint() {
        this.#isPainting = false;
        if (latest !== this) {
            return;
        }
        const { text, reasoning, vector } = this.answer;
        const calls = this.answer.calls.filter(Boolean);
        find("reasoning").hidden = reasoning === "";
        growText(find("reasoning-text"), reasoning);
        find("text").hidden = text === "" && vector === null;
        growText(find("text"), vector === null ? text : printVector(vector));
        find("calls-part").hidden = calls.length === 0;
        showCalls(calls);
    }

    #finish() {
        this.#isOver = true;
        if (this.#isRefused) {
            find("status").textContent = say("Not sent: see the form.");
            find("empty").textContent = say("Nothing asked.");
            find("empty").hidden = false;
            return;
        }
        const { usage, finish, pieces, error } = this.answer;
        const isStopped = this.signal.aborted;
        const isBad = !find("problem").hidden;
        setFact("total", printTime(performance.now() - this.#began));
        setFact("finish", isStopped ? say("stopped by you") : error === null ? finish : "error");
        setFact("prompt", usage.prompt);
        this.#showTokens(usage.completion ?? (pieces || null), { isGuess: usage.completion === null });
        find("raw").hidden = this.#raw === "";
        find("raw-text").textContent = this.#raw;
        find("status").textContent = isStopped ? say("Stopped.") : isBad ? say("Request failed.") : say("Done.");
        find("empty").textContent = isStopped ? say("Stopped before anything came.") : say("The answer is empty.");
        find("empty").hidden = this.answer.hasContent || isBad;
    }

    // The text of an answer that a conversation goes on from: one that ended by itself and called no tool.
    get said() {
        const { text, error, calls } = this.answer;
        return error === null && !this.signal.aborted && !this.#isRefused && calls.length === 0 && find("problem").hidden ? text : "";
    }

    // While nothing has come: what stands in the way, and what to do about it.
    async sayWhyItWaits() {
        const isWaiting = () => latest === this && this.#first === null && !this.#isOver;
        if (!isWaiting()) {
            return;
        }
        const { model, tenant = "" } = this.fields;
        const response = await fetch(`${root.dataset.wait}?${new URLSearchParams({ model, tenant })}`);
        const why = response.ok ? (await response.json()).why : "";
        if (isWaiting() && why !== "" && find("status").textContent !== why) {
            find("status").textContent = why;
        }
    }

    // Without a count of the engine the pieces of the stream stand for tokens, marked as a guess.
    #showTokens(count, { isGuess }) {
        if (count === null) {
            return;
        }
        const mark = isGuess ? "~" : "";
        setFact("completion", `${mark}${count}`);
        const isStream = this.#first !== null && this.#last > this.#first && count > 1;
        const seconds = (isStream ? this.#last - this.#first : (this.#last ?? this.#began) - this.#began) / 1000;
        if (seconds > 0 && count > 0) {
            setFact("rate", `${mark}${((isStream ? count - 1 : count) / seconds).toFixed(1)}`);
        }
    }

    // The record knows node, wait and ending, also where the head of a stream left before they were known.
    async followRecord() {
        if (this.#record === "") {
            return;
        }
        for (const pause of looksMs) {
            await new Promise((resolve) => setTimeout(resolve, pause));
            const response = await fetch(`${root.dataset.facts}?request=${encodeURIComponent(this.#requestId)}`);
            const facts = response.ok ? await response.json() : null;
            if (latest !== this) {
                return;
            }
            if (facts?.is_final) {
                this.#showFacts(facts);
                return;
            }
        }
    }

    #showFacts(facts) {
        setFact("state", facts.error_code ? `${facts.state} (${facts.error_code})` : facts.state);
        setFact("node", facts.node);
        setFact("model", facts.model);
        setFact("queue", facts.queue_ms === null ? "" : printTime(facts.queue_ms));
        if (this.answer.usage.prompt === null && facts.prompt_tokens !== null) {
            setFact("prompt", `${facts.tokens_estimated ? "~" : ""}${facts.prompt_tokens}`);
        }
        if (this.answer.usage.completion === null) {
            this.#showTokens(facts.completion_tokens, { isGuess: facts.tokens_estimated });
        }
    }
}

// Asks and shows the answer; returns its text once it has ended well, else "". What the record says is filled in a moment later.
export const showAnswer = async (fields, signal) => {
    clear();
    const run = new Run(fields, signal);
    latest = run;
    find("status").textContent = say("Sent. Waiting for the answer…");
    const waiting = setInterval(() => run.sayWhyItWaits().catch(() => {}), askWhyMs); // without a reason it still waits
    try {
        await run.go();
    } finally {
        clearInterval(waiting);
    }
    run.followRecord().catch(() => {}); // the answer is there; the record can be opened by its link
    return run.said;
};

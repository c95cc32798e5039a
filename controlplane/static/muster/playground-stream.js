// Reads what the five surfaces answer, streamed or whole, into one shape. Knows nothing of the page.

// Cuts a stream of server-sent events (WHATWG HTML section 9.2) into { event, data }.
export class EventCutter {
    #rest = "";
    #event = "";
    #data = [];

    feed(text) {
        const found = [];
        this.#rest += text;
        // A carriage return at the end may be half of a line end.
        const lines = this.#rest.split(/\r\n|\n|\r(?!$)/);
        this.#rest = lines.pop();
        for (const line of lines) {
            if (line === "") {
                if (this.#data.length > 0) {
                    found.push({ event: this.#event, data: this.#data.join("\n") });
                }
                this.#event = "";
                this.#data = [];
            } else if (line.startsWith("data:")) {
                this.#data.push(line.slice(line[5] === " " ? 6 : 5));
            } else if (line.startsWith("event:")) {
                this.#event = line.slice(6).trim();
            }
        }
        return found;
    }
}

const parse = (text) => {
    try {
        const value = JSON.parse(text);
        return value !== null && typeof value === "object" ? value : null;
    } catch {
        return null;
    }
};

// What is known of an answer. "text", "reasoning" and "calls" grow; "isEnded" is whether its closing event has come.
export class Answer {
    text = "";
    reasoning = "";
    calls = [];
    vector = null;
    usage = { prompt: null, completion: null };
    finish = "";
    error = null;
    isEnded = false;
    pieces = 0;

    constructor(surface) {
        this.surface = surface;
    }

    get hasContent() {
        return this.text !== "" || this.reasoning !== "" || this.calls.length > 0 || this.vector !== null;
    }

    // Takes one event of a stream.
    takeEvent({ event, data }) {
        if (data === "[DONE]") {
            this.isEnded = true;
            return;
        }
        const value = parse(data);
        if (value === null) {
            return;
        }
        if (value.error && event !== "response.failed") {
            this.#fail(value.error);
        } else if (this.surface === "messages") {
            this.#takeMessagesEvent(value);
        } else if (this.surface === "responses") {
            this.#takeResponsesEvent(value);
        } else {
            this.#takeChunk(value);
        }
    }

    // Takes a whole body. Returns false when it is no JSON object.
    takeWhole(body) {
        const value = parse(body);
        if (value === null) {
            return false;
        }
        this.isEnded = true;
        if (value.error) {
            this.#fail(value.error);
        } else if (this.surface === "messages") {
            (value.content ?? []).forEach((block, index) => this.#openBlock(index, block));
            this.finish = value.stop_reason ?? "";
        } else if (this.surface === "responses") {
            (value.output ?? []).forEach((item, index) => this.#takeItem(index, item));
            this.#closeResponse(value);
        } else if (this.surface === "embeddings") {
            this.vector = value.data?.[0]?.embedding ?? [];
        } else {
            const choice = value.choices?.[0] ?? {};
            this.#grow(choice.message ?? choice);
            this.finish = choice.finish_reason ?? "";
        }
        this.#count(value.usage);
        return true;
    }

    #fail(error) {
        const said = typeof error === "string" ? { message: error } : error;
        this.error = { message: said.message ?? "The answer broke off.", code: said.code ?? said.type ?? "", param: said.param ?? "" };
    }

    #count(usage) {
        if (!usage) {
            return;
        }
        const prompt = usage.prompt_tokens ?? usage.input_tokens;
        this.usage.prompt = typeof prompt === "number" ? prompt : this.usage.prompt;
        const completion = usage.completion_tokens ?? usage.output_tokens;
        this.usage.completion = typeof completion === "number" ? completion : this.usage.completion;
    }

    #say(text) {
        if (typeof text === "string" && text !== "") {
            this.text += text;
            this.pieces += 1;
        }
    }

    #think(text) {
        if (typeof text === "string" && text !== "") {
            this.reasoning += text;
            this.pieces += 1;
        }
    }

    #call(index, { id, name, text = "" }) {
        const call = (this.calls[index] ??= { id: "", name: "", text: "" });
        call.id = id || call.id;
        call.name = name || call.name;
        call.text += text;
        this.pieces += text === "" ? 0 : 1;
    }

    // Chat completions and completions.
    #takeChunk(chunk) {
        this.#count(chunk.usage);
        const choice = chunk.choices?.[0];
        if (choice) {
            this.#grow(choice.delta ?? choice);
            this.finish = choice.finish_reason ?? this.finish;
        }
    }

    #grow(part) {
        this.#think(part.reasoning_content ?? part.reasoning);
        this.#say(part.content ?? part.refusal ?? part.text);
        (part.tool_calls ?? []).forEach((call, place) => {
            this.#call(call.index ?? place, { id: call.id, name: call.function?.name, text: call.function?.arguments ?? "" });
        });
    }

    #takeMessagesEvent(value) {
        if (value.type === "message_start") {
            this.#count(value.message?.usage);
        } else if (value.type === "content_block_start") {
            this.#openBlock(value.index, value.content_block ?? {});
        } else if (value.type === "content_block_delta") {
            const delta = value.delta ?? {};
            this.#say(delta.text);
            this.#think(delta.thinking);
            if (delta.partial_json !== undefined) {
                this.#call(value.index, { text: delta.partial_json });
            }
        } else if (value.type === "message_delta") {
            this.#count(value.usage);
            this.finish = value.delta?.stop_reason ?? this.finish;
        } else if (value.type === "message_stop") {
            this.isEnded = true;
        }
    }

    #openBlock(index, block) {
        this.#say(block.text);
        this.#think(block.thinking);
        if (block.type === "tool_use") {
            const given = block.input && Object.keys(block.input).length > 0;
            this.#call(index, { id: block.id, name: block.name, text: given ? JSON.stringify(block.input) : "" });
        }
    }

    #takeResponsesEvent(value) {
        const { type, delta } = value;
        if (type === "response.output_text.delta" || type === "response.refusal.delta") {
            this.#say(delta);
        } else if (type === "response.reasoning_text.delta" || type === "response.reasoning_summary_text.delta") {
            this.#think(delta);
        } else if (type === "response.output_item.added" && value.item?.type === "function_call") {
            this.#call(value.output_index, { id: value.item.call_id, name: value.item.name });
        } else if (type === "response.function_call_arguments.delta") {
            this.#call(value.output_index, { text: delta });
        } else if (type === "response.completed" || type === "response.incomplete") {
            this.isEnded = true;
            this.#closeResponse(value.response ?? {});
        } else if (type === "response.failed") {
            this.#fail(value.response?.error ?? {});
        } else if (type === "error") {
            this.#fail(value);
        }
    }

    #takeItem(index, item) {
        if (item.type === "function_call") {
            this.#call(index, { id: item.call_id, name: item.name, text: item.arguments ?? "" });
        }
        for (const part of [...(item.content ?? []), ...(item.summary ?? [])]) {
            if (item.type === "reasoning") {
                this.#think(part.text);
            } else {
                this.#say(part.text ?? part.refusal);
            }
        }
    }

    #closeResponse(response) {
        this.finish = response.incomplete_details?.reason ?? response.status ?? this.finish;
        this.#count(response.usage);
        if (response.error) {
            this.#fail(response.error);
        }
    }
}

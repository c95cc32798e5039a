// The same question to one or two more models, side by side with the answer: text, times and what answered.
import { post } from "./playground-form.js";
import { Answer, EventCutter } from "./playground-stream.js";

const root = document.getElementById("playground");
const place = document.getElementById("pg-compared");
const pattern = document.getElementById("pg-compared-one");

export const chosenModels = () =>
    [...document.querySelectorAll("[data-compare]")].map((select) => select.value).filter((name) => name !== "");

const seconds = (ms) => new Intl.NumberFormat(document.documentElement.lang, { maximumFractionDigits: 2 }).format(ms / 1000);

class Column {
    constructor(fields, model) {
        this.fields = { ...fields, model, ticket: false };
        this.element = pattern.content.firstElementChild.cloneNode(true);
        this.answer = new Answer(fields.surface);
        this.began = performance.now();
        this.first = null;
        this.show("model", model);
    }

    show(name, value) {
        this.element.querySelector(`[data-one="${name}"]`).textContent = value;
    }

    fail(message) {
        const fault = this.element.querySelector('[data-one="fault"]');
        fault.textContent = message;
        fault.hidden = false;
    }

    async go(signal) {
        try {
            const response = await post(root.dataset.send, this.fields, signal);
            this.show("node", response.headers.get("x-muster-node") ?? "–");
            if (response.headers.get("content-type")?.startsWith("text/event-stream")) {
                await this.readStream(response);
            } else {
                this.answer.takeWhole(await response.text());
            }
        } catch (error) {
            if (!signal.aborted) {
                this.fail(error.message);
            }
        }
        this.finish();
    }

    async readStream(response) {
        const cutter = new EventCutter();
        const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
        for (;;) {
            const { done, value } = await reader.read();
            if (done) {
                return;
            }
            cutter.feed(value).forEach((event) => this.answer.takeEvent(event));
            if (this.first === null && this.answer.pieces > 0) {
                this.first = performance.now();
                this.show("first", `${seconds(this.first - this.began)} s`);
            }
            this.show("text", this.answer.text);
        }
    }

    finish() {
        const now = performance.now();
        const { text, usage, error, pieces } = this.answer;
        this.show("text", text);
        this.show("total", `${seconds(now - this.began)} s`);
        const tokens = usage.completion ?? pieces;
        const since = this.first ?? this.began;
        if (tokens > 1 && now > since) {
            this.show("rate", ((tokens - (this.first === null ? 0 : 1)) / ((now - since) / 1000)).toFixed(1));
        }
        if (error !== null) {
            this.fail(error.message);
        }
    }
}

// Asks each of the models; returns when all have ended.
export const compare = async (fields, signal) => {
    const columns = chosenModels().map((model) => new Column(fields, model));
    place.replaceChildren(...columns.map((column) => column.element));
    place.hidden = columns.length === 0;
    await Promise.all(columns.map((column) => column.go(signal)));
};

// Shows beside a form what it would mean, anew a moment after each change. The server computes it; nothing is stored.
const PAUSE_MS = 350;
const PATIENCE_MS = 20000;

const form = document.querySelector("form[data-preview]");
const into = form?.querySelector("[data-preview-into]");
let timer = 0;
let asked = null;

// What is impossible stands beside its field too, where there is a place for it.
const placeFaults = () => {
    for (const place of form.querySelectorAll("[id^=fault-]")) {
        const fault = into.querySelector(`[data-fault="${place.id.slice(6)}"] span`);
        place.textContent = fault?.textContent ?? "";
    }
};

const ask = async () => {
    asked?.abort();
    asked = new AbortController();
    const body = new FormData(form);
    body.set("step", "preview");
    into.setAttribute("aria-busy", "true");
    try {
        const signal = AbortSignal.any([asked.signal, AbortSignal.timeout(PATIENCE_MS)]);
        const answer = await fetch(form.action, { method: "POST", body, signal });
        if (answer.ok && !answer.redirected) {
            const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
            into.replaceChildren(...fresh.body.childNodes);
            placeFaults();
        }
        into.removeAttribute("aria-busy");
    } catch (error) {
        // One that was asked for later is on its way, or the next change asks again.
        if (error.name !== "AbortError") {
            into.removeAttribute("aria-busy");
        }
    }
};

form?.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(ask, PAUSE_MS);
});
// A form that opens filled in, by a link from elsewhere, says at once what it would mean.
if (form?.dataset.preview === "now" && !form.querySelector("fieldset:disabled")) {
    await ask();
}

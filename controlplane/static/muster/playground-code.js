// The question as code: asked of the control plane whenever the form changes, in three languages behind tabs.
import { form, post, readForm, say } from "./playground-form.js";

const find = (name) => document.getElementById(`pg-${name}`);
const tabs = [...document.querySelectorAll(".pg-tabs [role=tab]")];
const pauseMs = 200;
const usualHint = find("code-hint").innerHTML;
let code = {};
let asking = null;

const chosen = () => tabs.find((tab) => tab.getAttribute("aria-selected") === "true");

const show = () => {
    find("code").textContent = code[chosen().dataset.language] ?? "";
    find("code").setAttribute("aria-labelledby", chosen().id);
    find("copy").textContent = say("Copy");
};

const choose = (tab) => {
    for (const each of tabs) {
        each.setAttribute("aria-selected", String(each === tab));
        each.tabIndex = each === tab ? 0 : -1;
    }
    tab.focus();
    show();
};

// Arrows, Home and End walk through the tabs (ARIA Authoring Practices, tabs).
const walk = (event) => {
    const place = tabs.indexOf(chosen());
    const next = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (next !== undefined) {
        event.preventDefault();
        choose(tabs.at(next % tabs.length));
    }
};

const copy = async () => {
    const button = find("copy");
    try {
        await navigator.clipboard.writeText(find("code").textContent);
        button.textContent = say("Copied");
    } catch {
        // Plain HTTP on a network: the browser has no clipboard for us.
        getSelection().selectAllChildren(find("code"));
        button.textContent = say("Selected: press Ctrl+C");
    }
};

const refresh = async (url) => {
    asking?.abort();
    asking = new AbortController();
    try {
        const response = await post(url, readForm({ isWhole: false }), asking.signal);
        const answer = await response.json();
        find("code-hint").classList.toggle("pg-error", answer.error !== undefined);
        if (answer.error === undefined) {
            code = answer;
            find("code-hint").innerHTML = usualHint;
            show();
        } else {
            find("code-hint").textContent = answer.error.message;
        }
    } catch (error) {
        if (error.name !== "AbortError") {
            find("code-hint").textContent = say("The control plane did not answer, so the code may be old. Reload the page.");
        }
    }
};

export const followCode = (url) => {
    let timer = 0;
    const soon = () => {
        clearTimeout(timer);
        timer = setTimeout(() => refresh(url), pauseMs);
    };
    form.addEventListener("input", soon);
    form.addEventListener("change", soon);
    for (const tab of tabs) {
        tab.addEventListener("click", () => choose(tab));
        tab.addEventListener("keydown", walk);
    }
    find("copy").addEventListener("click", copy);
    refresh(url);
};

"use strict";
// Asks the browser for a passkey and hands its answer to the server, which alone judges it.

const toBytes = (text) =>
    Uint8Array.from(atob(text.replace(/-/g, "+").replace(/_/g, "/")), (character) => character.charCodeAt(0));
const toText = (buffer) =>
    btoa(String.fromCharCode(...new Uint8Array(buffer))).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");

function readOptions(sent) {
    const options = { ...sent, challenge: toBytes(sent.challenge) };
    if (sent.user) {
        options.user = { ...sent.user, id: toBytes(sent.user.id) };
    }
    for (const list of ["excludeCredentials", "allowCredentials"]) {
        if (sent[list]) {
            options[list] = sent[list].map((one) => ({ ...one, id: toBytes(one.id) }));
        }
    }
    return options;
}

function writeCredential(credential) {
    const response = { clientDataJSON: toText(credential.response.clientDataJSON) };
    for (const name of ["attestationObject", "authenticatorData", "signature", "userHandle"]) {
        const value = credential.response[name];
        if (value && value.byteLength) {
            response[name] = toText(value);
        }
    }
    if (credential.response.getTransports) {
        response.transports = credential.response.getTransports();
    }
    return { id: credential.id, rawId: toText(credential.rawId), type: credential.type, response };
}

// What is said, in the language of the page; by the name of what the browser answered.
const says = document.getElementById("signin-says")?.dataset ?? {};
const SAID_BY_BROWSER = {
    NotAllowedError: says.cancelled,
    InvalidStateError: says.known,
    SecurityError: says.elsewhere,
    NotSupportedError: says.unusable,
};

async function post(url, token, body) {
    const response = await fetch(url, {
        method: "POST",
        headers: { "Content-Type": "application/json", "X-CSRFToken": token },
        body: JSON.stringify(body),
        credentials: "same-origin",
    }).catch(() => {
        throw new Error(says.silent);
    });
    const answer = await response.json().catch(() => ({}));
    if (!response.ok) {
        throw new Error(answer.error?.message ?? says.odd);
    }
    return answer;
}

async function run(form) {
    const token = form.elements.csrfmiddlewaretoken.value;
    const isNew = form.dataset.passkey === "create";
    const publicKey = readOptions(await post(form.dataset.options, token, {}));
    const credential = isNew
        ? await navigator.credentials.create({ publicKey })
        : await navigator.credentials.get({ publicKey });
    const wanted = new URLSearchParams({ next: form.elements.next?.value ?? "" });
    const answer = await post(`${form.dataset.answer}${isNew ? "" : `?${wanted}`}`, token, {
        credential: writeCredential(credential),
        label: form.elements.label?.value ?? "",
    });
    window.location.assign(answer.next);
}

async function submit(event) {
    event.preventDefault();
    const form = event.currentTarget;
    const button = form.querySelector("button");
    const fault = form.querySelector("[data-fault]");
    fault.textContent = "";
    button.disabled = true;
    try {
        await run(form);
    } catch (error) {
        fault.textContent = SAID_BY_BROWSER[error.name] ?? error.message;
        button.disabled = false;
        button.focus();
    }
}

function showPlace(section) {
    const show = (name) => section.querySelector(`[data-${name}]`)?.removeAttribute("hidden");
    const origin = section.dataset.origin;
    const form = section.querySelector("[data-passkey]");
    if (origin && origin !== window.location.origin) {
        section.querySelector("[data-elsewhere-link]").href = origin + window.location.pathname + window.location.search;
        show("elsewhere");
    } else if (origin && !window.PublicKeyCredential) {
        show("unsupported");
    } else {
        return;
    }
    if (form) {
        form.hidden = true;
    }
}

document.querySelectorAll("[data-passkey]").forEach((form) => form.addEventListener("submit", submit));
document.querySelectorAll("[data-origin]").forEach(showPlace);

// Approving: the digest is computed here, from the values that the page shows, and only that digest is signed.
import { Untrustworthy, decodeBytes, digestReason, digestStatement, digestWords, encodeBytes, encodeHex, readMembers } from "./statement.js";

const signed = document.getElementById("signed");
const form = document.getElementById("approve");
const fault = document.getElementById("approve-fault");
const verdict = document.getElementById("own-verdict");
const says = document.getElementById("says")?.dataset ?? {};

/** Returns a sentence in the language of the page. */
const tell = (name, value = "") => (says[name] ?? name).replace("%s", () => value);

const say = (text) => {
    // Emptied first, so that the same words are read out again when they happen again.
    fault.textContent = "";
    requestAnimationFrame(() => {
        fault.textContent = text;
    });
};

const requireSameReason = async (members) => {
    const shown = signed.ownerDocument.getElementById("reason");
    if (!shown) {
        return;
    }
    const text = shown.textContent;
    const digests = await Promise.all([digestReason(text), digestReason(text.replaceAll("\n", "\r\n"))]);
    if (!digests.includes(members.reasonDigest)) {
        throw new Untrustworthy("the reason shown is not the one that the statement names");
    }
};

/** Returns the members as the proof shows them. It is opened for the look: what stays hidden then would be signed and not read. */
const readShown = () => {
    const wasOpen = signed.open;
    signed.open = true;
    try {
        return readMembers(signed);
    } finally {
        signed.open = wasOpen;
    }
};

/** Returns the digest of what the page shows; throws Untrustworthy when the server showed another one beside it. */
const computeDigest = async () => {
    const members = readShown();
    const digest = await digestStatement(members);
    await requireSameReason(members);
    const hex = encodeHex(digest);
    const words = digestWords(digest);
    document.getElementById("own-words").textContent = words;
    document.getElementById("own-hex").textContent = hex;
    const shownWords = document.getElementById("server-words").textContent;
    const shownHex = document.getElementById("server-hex").textContent;
    if (shownWords !== words || shownHex !== hex) {
        throw new Untrustworthy(`the server says ${shownWords}, but what this page shows is ${words}`);
    }
    for (const time of signed.querySelectorAll("[data-time]")) {
        const at = new Date(members[time.dataset.time] * 1000);
        time.textContent = Number.isNaN(at.getTime()) ? "not a date" : `${at.toISOString().slice(0, 19).replace("T", " ")} UTC`;
    }
    return { digest, members };
};

const explainMismatch = (error) => tell("mismatch", error.message);

/** Compares and says what came of it; returns the digest, or null when nothing may be signed. */
const check = async () => {
    try {
        const { digest, members } = await computeDigest();
        const same = document.createElement("strong");
        same.textContent = tell("same");
        verdict.replaceChildren(same, ` ${tell("signs", `${members.operation} → ${members.targets.join(", ")}`)}`);
        verdict.className = "small verdict is-same";
        return digest;
    } catch (error) {
        if (!(error instanceof Untrustworthy)) {
            throw error;
        }
        verdict.textContent = explainMismatch(error);
        verdict.className = "note note-bad";
        return null;
    }
};

/** Returns why this browser cannot use a passkey here, or "". */
const findObstacle = () => {
    if (/^[0-9.]+$|:/.test(location.hostname.replace(/^\[|\]$/g, ""))) {
        return tell("numberHost");
    }
    if (!globalThis.isSecureContext || !globalThis.crypto?.subtle) {
        return tell("insecure");
    }
    if (!globalThis.PublicKeyCredential || !navigator.credentials) {
        return tell("noPasskeys");
    }
    if (!form.dataset.assertion) {
        return tell("noOwn");
    }
    return "";
};

const explainRefusal = (error, rpId) => {
    switch (error.name) {
        case "NotAllowedError":
        case "AbortError":
            return tell("cancelled");
        case "SecurityError":
            return tell("elsewhere", `${rpId} ≠ ${location.hostname}`);
        case "InvalidStateError":
        case "NotSupportedError":
            return tell("unusable");
        default:
            return tell("notSigned", error.message);
    }
};

const sign = async (digest, options) => {
    const credential = await navigator.credentials.get({
        publicKey: {
            rpId: options.rpId,
            timeout: options.timeout,
            challenge: digest,
            userVerification: "required",
            allowCredentials: options.allowCredentials.map((allowed) => ({ ...allowed, id: decodeBytes(allowed.id) })),
        },
    });
    const { clientDataJSON, authenticatorData, signature } = credential.response;
    return {
        type: "webauthn",
        approver: form.dataset.approver,
        keyid: encodeBytes(credential.rawId),
        clientDataJSON: encodeBytes(clientDataJSON),
        authenticatorData: encodeBytes(authenticatorData),
        signature: encodeBytes(signature),
    };
};

/** Posts the proof; returns "" or what the server said. */
const send = async (proof) => {
    let answer;
    try {
        answer = await fetch(form.action, {
            method: "POST",
            headers: { "Content-Type": "application/json", "X-CSRFToken": form.elements.csrfmiddlewaretoken.value },
            body: JSON.stringify({ proof, comment: form.elements.comment.value }),
            signal: AbortSignal.timeout(20000),
        });
    } catch {
        return tell("silent");
    }
    if (answer.ok) {
        return "";
    }
    const body = await answer.json().catch(() => null);
    return body?.error?.message ?? tell("refused", answer.status);
};

const approve = async () => {
    const digest = await check();
    if (!digest) {
        verdict.scrollIntoView({ block: "center" });
        return explainMismatch(new Untrustworthy(tell("seeWords")));
    }
    const options = JSON.parse(form.dataset.assertion);
    let proof;
    try {
        proof = await sign(digest, options);
    } catch (error) {
        if (!(error instanceof DOMException || error instanceof TypeError)) {
            throw error;
        }
        return explainRefusal(error, options.rpId);
    }
    const refusal = await send(proof);
    if (!refusal) {
        location.assign(location.pathname);
    }
    return refusal;
};

form?.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button");
    if (button.disabled) {
        return;
    }
    const obstacle = findObstacle();
    if (obstacle) {
        say(obstacle);
        return;
    }
    say("");
    button.disabled = true;
    try {
        const refusal = await approve();
        say(refusal);
    } finally {
        button.disabled = false;
    }
});

if (signed && globalThis.crypto?.subtle) {
    await check();
} else if (verdict) {
    verdict.textContent = tell("cannotCompare");
    verdict.className = "note note-care small";
}

// Approving: the digest is computed here, from the values that the page shows, and only that digest is signed.
import { Untrustworthy, decodeBytes, digestReason, digestStatement, digestWords, encodeBytes, encodeHex, readMembers } from "./statement.js";

const signed = document.getElementById("signed");
const form = document.getElementById("approve");
const fault = document.getElementById("approve-fault");
const verdict = document.getElementById("own-verdict");
const signWords = document.getElementById("sign-words");

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

/** Returns the digest of what the page shows; throws Untrustworthy when the server showed another one beside it. */
const computeDigest = async () => {
    const members = readMembers(signed);
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
    return digest;
};

const explainMismatch = (error) =>
    `Do not approve. The values on this page do not belong to the statement: ${error.message}. Nothing was signed. ` +
    "Tell your colleagues by another way than this site.";

/** Compares and says what came of it; returns the digest, or null when nothing may be signed. */
const check = async () => {
    try {
        const digest = await computeDigest();
        signWords.textContent = digestWords(digest);
        signWords.className = "words";
        verdict.textContent = "Same words: what you read here is what would be signed.";
        verdict.className = "note note-good small after";
        return digest;
    } catch (error) {
        if (!(error instanceof Untrustworthy)) {
            throw error;
        }
        signWords.textContent = "nothing: the values do not belong together";
        signWords.className = "note note-bad";
        verdict.textContent = explainMismatch(error);
        verdict.className = "note note-bad after";
        return null;
    }
};

/** Returns why this browser cannot use a passkey here, or "". */
const findObstacle = () => {
    if (/^[0-9.]+$|:/.test(location.hostname.replace(/^\[|\]$/g, ""))) {
        return "Passkeys do not work on an address made of numbers. Open this page by its host name, such as http://localhost.";
    }
    if (!globalThis.isSecureContext || !globalThis.crypto?.subtle) {
        return "Passkeys need HTTPS (or http://localhost). Open this page by its HTTPS address.";
    }
    if (!globalThis.PublicKeyCredential || !navigator.credentials) {
        return "This browser has no passkeys. Use another browser, or approve with a key file: see below.";
    }
    if (!form.dataset.assertion) {
        return "None of your passkeys is in the policy. Enrol one under “My keys” and have it added by a change of the policy.";
    }
    return "";
};

const explainRefusal = (error, rpId) => {
    switch (error.name) {
        case "NotAllowedError":
        case "AbortError":
            return "Nothing was signed: it was cancelled, it took too long, or none of your passkeys is on this device.";
        case "SecurityError":
            return `The passkeys of this policy belong to ${rpId}; this page was opened at ${location.hostname}.`;
        case "InvalidStateError":
        case "NotSupportedError":
            return "This device cannot use your passkey. Try the device that you enrolled it on.";
        default:
            return `Nothing was signed: ${error.message}`;
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
        return "The control plane did not answer. Look at the list of approvals before you try again.";
    }
    if (answer.ok) {
        return "";
    }
    const body = await answer.json().catch(() => null);
    return body?.error?.message ?? `The control plane refused (status ${answer.status}). Reload the page and look again.`;
};

const approve = async () => {
    const digest = await check();
    if (!digest) {
        verdict.scrollIntoView({ block: "center" });
        return explainMismatch(new Untrustworthy("see the comparison of the words"));
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
    verdict.textContent = "This browser cannot compare the words here: that needs HTTPS or http://localhost.";
    verdict.className = "note note-care small after";
}

// The statement as this page shows it, in the bytes that are signed. What wire/optoken/approval.py does, once more, in the browser.

const DOMAIN = "op-statement/v1";
const REASON_DOMAIN = "op-reason/v1";
const CONSONANTS = "bdfghjklmnprstvz";
const VOWELS = "aiou";
// All that Python's str.isprintable() refuses: control, direction, invisible and unassigned characters, and odd spaces.
const UNPRINTABLE = /[^ \P{Z}]|\p{C}/u;

/** The page shows something that cannot be the statement. The message is for the person in front of it. */
export class Untrustworthy extends Error {}

/** Returns base64url without padding. */
export const encodeBytes = (bytes) =>
    btoa(String.fromCharCode(...new Uint8Array(bytes))).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");

/** Returns the bytes of base64url. */
export const decodeBytes = (text) =>
    Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (letter) => letter.codePointAt(0));

/** Returns bytes as hexadecimal digits. */
export const encodeHex = (bytes) => [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");

/** Returns the first 96 bits of a digest as six words (proquints, arXiv:0901.4016). */
export const digestWords = (digest) => {
    const words = [];
    for (let i = 0; i < 12; i += 2) {
        const n = digest[i] * 256 + digest[i + 1];
        words.push(
            CONSONANTS[n >> 12] + VOWELS[(n >> 10) & 3] + CONSONANTS[(n >> 6) & 15] + VOWELS[(n >> 4) & 3] + CONSONANTS[n & 15],
        );
    }
    return words.join("-");
};

const writeObject = (value) => {
    const names = Object.keys(value).sort();
    if (names.some((name) => !/^[ -~]*$/.test(name))) {
        throw new Untrustworthy("a name on this page is not printable ASCII");
    }
    return `{${names.map((name) => `${JSON.stringify(name)}:${canonical(value[name])}`).join(",")}}`;
};

/** Returns the canonical encoding (RFC 8785 without floats and null) of a value, or throws Untrustworthy. */
export const canonical = (value) => {
    if (typeof value === "boolean" || (Number.isSafeInteger(value) && !Object.is(value, -0))) {
        return String(value);
    }
    if (typeof value === "string" && !UNPRINTABLE.test(value)) {
        return JSON.stringify(value);
    }
    if (Array.isArray(value)) {
        return `[${value.map(canonical).join(",")}]`;
    }
    if (value !== null && typeof value === "object") {
        return writeObject(value);
    }
    throw new Untrustworthy("a value on this page cannot be part of a statement");
};

const find = (root, name) => {
    const found = root.querySelectorAll(`[data-member="${name}"]`);
    if (found.length !== 1) {
        throw new Untrustworthy(`this page shows ${found.length} values for ${name}, where there must be one`);
    }
    // Hidden text would be signed and not read.
    if (found[0].checkVisibility && !found[0].checkVisibility({ opacityProperty: true, visibilityProperty: true })) {
        throw new Untrustworthy(`the value of ${name} is not visible`);
    }
    return found[0];
};

const readText = (root, name) => {
    const element = find(root, name);
    if (element.childElementCount) {
        throw new Untrustworthy(`the value of ${name} is not plain text`);
    }
    return element.textContent;
};

const readNumber = (root, name) => {
    const text = readText(root, name);
    if (!/^(0|[1-9][0-9]{0,15})$/.test(text)) {
        throw new Untrustworthy(`the value of ${name} is not a whole number`);
    }
    return Number(text);
};

const readTargets = (root) => {
    const items = [...find(root, "targets").children];
    if (!items.length || items.some((item) => item.childElementCount)) {
        throw new Untrustworthy("the list of targets is not plain text");
    }
    return items.map((item) => item.textContent);
};

// A name that occurs twice, or a number in another spelling, would be shown and not be signed: the text must be the one there is.
const readParams = (root) => {
    const shown = readText(root, "params");
    let params;
    try {
        params = JSON.parse(shown);
    } catch {
        throw new Untrustworthy("the parameters are not JSON");
    }
    if (params === null || typeof params !== "object" || Array.isArray(params)) {
        throw new Untrustworthy("the parameters are not an object");
    }
    const withoutSpace = shown.replace(/("(?:[^"\\]|\\.)*")|\s+/g, "$1");
    if (withoutSpace !== canonical(params)) {
        throw new Untrustworthy("the parameters are written in a way that can be read in two ways");
    }
    return params;
};

// Version 2 says what a failure does to the rest of a batch. In version 1 nobody would sign what is shown of that.
const readBatch = (root) => {
    if (readNumber(root, "v") !== 2) {
        if (root.querySelector('[data-member="stopsOnFailure"]')) {
            throw new Untrustworthy("this page shows a value that a statement of this version does not hold");
        }
        return {};
    }
    const text = readText(root, "stopsOnFailure");
    if (text !== "true" && text !== "false") {
        throw new Untrustworthy("the value of stopsOnFailure is neither true nor false");
    }
    return { stopsOnFailure: text === "true" };
};

/** Returns the members of the statement from the values that ``root`` shows, or throws Untrustworthy. */
export const readMembers = (root) => ({
    ...readBatch(root),
    v: readNumber(root, "v"),
    opId: readText(root, "opId"),
    operation: readText(root, "operation"),
    class: readText(root, "class"),
    targets: readTargets(root),
    params: readParams(root),
    policy: {
        id: readText(root, "policy.id"),
        version: readNumber(root, "policy.version"),
        sha256: readText(root, "policy.sha256"),
    },
    requestedBy: readText(root, "requestedBy"),
    reasonDigest: readText(root, "reasonDigest"),
    requestedAt: readNumber(root, "requestedAt"),
    notBefore: readNumber(root, "notBefore"),
    notAfter: readNumber(root, "notAfter"),
    maxUses: readNumber(root, "maxUses"),
});

const digest = async (domain, text) => {
    const bytes = new TextEncoder().encode(`${domain}\0${text}`);
    return new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
};

/** Returns the 32 bytes that approvers sign, of the members of a statement. */
export const digestStatement = (members) => digest(DOMAIN, canonical(members));

/** Returns the digest under which a statement names its reason, as hexadecimal digits. */
export const digestReason = async (reason) => encodeHex(await digest(REASON_DOMAIN, reason));

// What pages that follow something share: a socket that comes back by itself, and a change of a page that leaves the rest alone.
import { mayChange, offerPause } from "./refresh.js";
import { watch } from "./silence.js";

const LONGEST_PAUSE_MS = 30000;
const PATIENCE_MS = 30000; // given up sooner, a busy control plane would be asked again and again and never heard

// Calls `take` with each JSON object that the server pushes. Without a socket the page shows what came last, and says so.
export const follow = (path, take) => {
    const scheme = location.protocol === "https:" ? "wss:" : "ws:";
    const silence = watch();
    let pauseMs = 1000;
    let last = null;
    const show = () => {
        if (last !== null && mayChange()) {
            take(last);
            last = null;
        }
    };
    offerPause(show);
    const connect = () => {
        const socket = new WebSocket(`${scheme}//${location.host}${path}`);
        socket.addEventListener("message", (event) => {
            pauseMs = 1000;
            silence.heard();
            last = JSON.parse(event.data);
            show();
        });
        socket.addEventListener("close", (event) => {
            if (silence.ended(event.code)) {
                return;
            }
            setTimeout(connect, pauseMs * (0.5 + Math.random()));
            pauseMs = Math.min(pauseMs * 2, LONGEST_PAUSE_MS);
        });
        addEventListener("pagehide", () => socket.close(), { once: true });
    };
    connect();
};

// Asks for this page again every `everyMs` and calls `show` with each one that comes, unless the reader has paused it.
export const followPage = (everyMs, show) => {
    const silence = watch();
    let isLooking = false;
    const look = async () => {
        if (isLooking || document.hidden || !mayChange()) {
            return;
        }
        isLooking = true;
        try {
            const headers = { "X-Muster-Follow": "1" }; // whoever only leaves a page open is idle
            const answer = await fetch(location.href, { headers, signal: AbortSignal.timeout(PATIENCE_MS) });
            if (answer.redirected && new URL(answer.url).pathname !== location.pathname) {
                silence.signedOut();
            } else if (answer.ok) {
                silence.heard();
                const fresh = parse(await answer.text());
                if (mayChange()) {
                    show(fresh);
                }
            }
        } catch {
            // The next one may get through; until then the page says since when it is old.
        } finally {
            isLooking = false;
        }
    };
    setInterval(look, everyMs);
    offerPause(look);
    document.addEventListener("visibilitychange", look);
};

// Changes what differs and leaves the rest alone: a selection survives, what a reader opened stays open, a bar moves.
export const update = (shown, fresh) => {
    if (shown.nodeType !== fresh.nodeType || shown.nodeName !== fresh.nodeName) {
        shown.replaceWith(fresh.cloneNode(true));
        return;
    }
    if (shown.localName === "mst-chart") {
        shown.show(JSON.parse(fresh.querySelector("script[type='application/json']").textContent));
        return; // what is drawn in it is not in the page that came
    }
    if (shown.nodeType !== Node.ELEMENT_NODE) {
        if (shown.nodeValue !== fresh.nodeValue) {
            shown.nodeValue = fresh.nodeValue;
        }
        return;
    }
    for (const name of shown.getAttributeNames()) {
        if (!fresh.hasAttribute(name) && name !== "open") {
            shown.removeAttribute(name);
        }
    }
    for (const name of fresh.getAttributeNames()) {
        if (shown.getAttribute(name) !== fresh.getAttribute(name)) {
            shown.setAttribute(name, fresh.getAttribute(name));
        }
    }
    updateChildren(shown, fresh);
};

// The same for what is inside.
export const updateChildren = (shown, fresh) => {
    const before = [...shown.childNodes];
    const after = [...fresh.childNodes];
    after.forEach((node, index) => {
        if (index < before.length) {
            update(before[index], node);
        } else {
            shown.append(node.cloneNode(true));
        }
    });
    before.slice(after.length).forEach((node) => node.remove());
};

export const parse = (html) => new DOMParser().parseFromString(html, "text/html");

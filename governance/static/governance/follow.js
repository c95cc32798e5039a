// Keeps what happens to an operation current: by its socket, and every three seconds by a request while there is no socket.
import { parse, update } from "../muster/live.js";
import { watch } from "../muster/silence.js";

const page = document.getElementById("operation");
const said = document.getElementById("said");
const POLL_MS = 3000;
const PATIENCE_MS = 30000; // given up sooner, a busy control plane would be asked again and again and never heard
const LONGEST_PAUSE_MS = 30000;
let pauseMs = 1000;
let isConnected = false;
let isOver = false;
let isPolling = false;
let silence = null;

// A button that has had its day goes; the focus does not go with it.
const offer = (actions) => {
    for (const form of document.querySelectorAll("[data-action]")) {
        const isGone = !actions.has(form.dataset.action);
        if (isGone && !form.hidden && form.contains(document.activeElement)) {
            document.getElementById("what-now").focus();
        }
        form.hidden = isGone;
    }
};

const show = (html) => {
    const fresh = parse(html);
    for (const part of fresh.querySelectorAll("[data-live]")) {
        const shown = page.querySelector(`[data-live="${part.dataset.live}"]`);
        if (shown) {
            update(shown, part);
        }
    }
    const now = fresh.querySelector("[data-said]");
    if (now) {
        offer(new Set(now.dataset.actions.split(" ")));
        if (said.textContent !== now.dataset.said) {
            said.textContent = now.dataset.said;
        }
    }
};

const poll = async () => {
    if (isPolling || isConnected || isOver || document.hidden) {
        return;
    }
    isPolling = true;
    try {
        const answer = await fetch(page.dataset.poll, { signal: AbortSignal.timeout(PATIENCE_MS) });
        const pushed = answer.ok ? await answer.json() : null;
        if (pushed !== null && !isConnected) {
            silence.heard();
            show(pushed.html);
        }
    } catch {
        // The next one may get through.
    } finally {
        isPolling = false;
    }
};

const connect = () => {
    const scheme = location.protocol === "https:" ? "wss:" : "ws:";
    const socket = new WebSocket(`${scheme}//${location.host}${page.dataset.socket}`);
    socket.addEventListener("message", (event) => {
        isConnected = true;
        pauseMs = 1000;
        silence.heard();
        show(JSON.parse(event.data).html);
    });
    socket.addEventListener("close", (event) => {
        isConnected = false;
        isOver ||= silence.ended(event.code);
        if (!isOver) {
            setTimeout(connect, pauseMs * (0.5 + Math.random()));
            pauseMs = Math.min(pauseMs * 2, LONGEST_PAUSE_MS);
        }
    });
    addEventListener(
        "pagehide",
        () => {
            isOver = true;
            socket.close();
        },
        { once: true },
    );
};

if (page) {
    silence = watch();
    connect();
    setInterval(poll, POLL_MS);
    // A page that comes back from the browser's memory has lost its socket.
    addEventListener("pageshow", (event) => {
        if (event.persisted) {
            isOver = false;
            connect();
        }
    });
}

// Keeps the counters of the overview current. Without a socket the page simply shows the state it was loaded with.
"use strict";

(() => {
    const root = document.getElementById("overview");
    if (!root) {
        return;
    }
    const scheme = location.protocol === "https:" ? "wss:" : "ws:";
    const longestPauseMs = 30000;
    let pauseMs = 1000;

    const show = (counters) => {
        for (const element of root.querySelectorAll("[data-live]")) {
            const value = counters[element.dataset.live];
            if (typeof value === "number") {
                element.textContent = String(value);
            }
        }
    };

    const connect = () => {
        const socket = new WebSocket(`${scheme}//${location.host}${root.dataset.socket}`);
        socket.addEventListener("message", (event) => {
            pauseMs = 1000;
            show(JSON.parse(event.data));
        });
        socket.addEventListener("close", () => {
            setTimeout(connect, pauseMs * (0.5 + Math.random()));
            pauseMs = Math.min(pauseMs * 2, longestPauseMs);
        });
        addEventListener("pagehide", () => socket.close(), { once: true });
    };

    connect();
})();

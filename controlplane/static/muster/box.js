// Keeps the state of a box current. Without a socket the page simply shows the state it was loaded with.
"use strict";

(() => {
    const root = document.getElementById("box");
    if (!root) {
        return;
    }
    const scheme = location.protocol === "https:" ? "wss:" : "ws:";
    const longestPauseMs = 30000;
    let pauseMs = 1000;

    // Changes what differs and leaves the rest alone: a selection survives, and a bar moves instead of being replaced.
    const update = (shown, fresh) => {
        if (shown.nodeType !== fresh.nodeType || shown.nodeName !== fresh.nodeName) {
            shown.replaceWith(fresh.cloneNode(true));
            return;
        }
        if (shown.nodeType !== Node.ELEMENT_NODE) {
            if (shown.nodeValue !== fresh.nodeValue) {
                shown.nodeValue = fresh.nodeValue;
            }
            return;
        }
        for (const name of shown.getAttributeNames()) {
            if (!fresh.hasAttribute(name)) {
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

    const updateChildren = (shown, fresh) => {
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

    const connect = () => {
        const socket = new WebSocket(`${scheme}//${location.host}${root.dataset.socket}`);
        socket.addEventListener("message", (event) => {
            pauseMs = 1000;
            const page = new DOMParser().parseFromString(JSON.parse(event.data).html, "text/html");
            updateChildren(root, page.body);
        });
        socket.addEventListener("close", () => {
            setTimeout(connect, pauseMs * (0.5 + Math.random()));
            pauseMs = Math.min(pauseMs * 2, longestPauseMs);
        });
        addEventListener("pagehide", () => socket.close(), { once: true });
    };

    connect();
})();

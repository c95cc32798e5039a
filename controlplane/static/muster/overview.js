// Keeps the overview current: its counters, what needs attention, and the nodes.
import { follow, parse, updateChildren } from "./live.js";

const root = document.getElementById("overview");

const show = (pushed) => {
    for (const element of root.querySelectorAll("[data-live]")) {
        const value = pushed[element.dataset.live];
        if (typeof value === "number" && element.textContent !== String(value)) {
            element.textContent = String(value);
        }
    }
    const fresh = parse(pushed.html);
    for (const element of document.querySelectorAll("[data-part]")) {
        const part = fresh.querySelector(`[data-part="${element.dataset.part}"]`);
        if (part) {
            updateChildren(element, part);
        }
    }
};

if (root) {
    follow(root.dataset.socket, show);
}

// Keeps the overview current: its counters, its parts, and its charts, of which only what changed is sent.
import { follow, parse, updateChildren } from "./live.js";

const root = document.getElementById("overview");

const show = ({ counters, parts, charts, waiting }) => {
    for (const [name, html] of Object.entries(waiting === undefined ? parts : { ...parts, waiting })) {
        const shown = root.querySelector(`[data-part="${CSS.escape(name)}"]`);
        if (shown) {
            updateChildren(shown, parse(html).body);
        }
    }
    for (const [name, value] of Object.entries(counters)) {
        for (const element of root.querySelectorAll(`[data-live="${CSS.escape(name)}"]`)) {
            if (element.textContent !== value) {
                element.textContent = value;
            }
        }
    }
    for (const data of Object.values(charts)) {
        root.querySelector(`mst-chart[data-name="${CSS.escape(data.name)}"]`)?.show(data);
    }
};

if (root) {
    follow(root.dataset.socket, show);
}

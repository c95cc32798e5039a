// Keeps the page of a node current: its head on every tab, and what it has of models and memory on the first.
import { follow, parse, updateChildren } from "./live.js";

const head = document.getElementById("node-head");
if (head) {
    follow(head.dataset.socket, (pushed) => {
        if (pushed.head) {
            updateChildren(head, parse(pushed.head).body);
        }
        const state = document.getElementById("node");
        if (state && pushed.html) {
            updateChildren(state, parse(pushed.html).body);
        }
    });
}

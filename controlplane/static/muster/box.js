// Keeps the state of a box current.
import { follow, parse, updateChildren } from "./live.js";

const root = document.getElementById("box");
if (root) {
    follow(root.dataset.socket, (pushed) => updateChildren(root, parse(pushed.html).body));
}

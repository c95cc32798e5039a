// Keeps the state of a node current.
import { follow, parse, updateChildren } from "./live.js";

const root = document.getElementById("node");
if (root) {
    follow(root.dataset.socket, (pushed) => updateChildren(root, parse(pushed.html).body));
}

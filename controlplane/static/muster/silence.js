// Says on a page that follows something when it is not current: nothing has come for a while, or its reader may not look.
import { mayChange } from "./refresh.js";

// By close codes that end a socket for good: what the reader is told, and how they go on.
const ENDS = new Map([
    [4401, ["signedOut", "signIn"]],
    [4403, ["withheld", "reload"]],
]);
// The words stand in the page, in its reader's language.
const words = document.getElementById("page").dataset;
const say = (name, at) => words[name].replace("{time}", at.toLocaleTimeString(document.documentElement.lang));
const SILENT_AFTER_MS = 15000; // something comes every two seconds
const LOOK_MS = 1000;

// Returns what to call when something has come, and when the socket was closed.
export const watch = () => {
    // Empty and not hidden: screen readers say what changes in a status that is there, and not one that appears.
    const note = document.createElement("p");
    note.className = "silent";
    note.setAttribute("role", "status");
    document.body.append(note);
    let heardAt = new Date();
    let isOver = false;
    const look = () => {
        if (isOver) {
            return;
        }
        const isSilent = mayChange() && Date.now() - heardAt.getTime() >= SILENT_AFTER_MS;
        const said = isSilent ? say("silent", heardAt) : "";
        if (note.textContent !== said) {
            note.textContent = said;
        }
    };
    setInterval(look, LOOK_MS);
    return {
        heard: () => {
            heardAt = new Date();
            isOver = false; // a page that the browser kept may find its reader signed in again
            look();
        },
        // Returns whether the server ended the socket for good; the page says so then.
        ended: (code) => {
            if (!ENDS.has(code)) {
                return false;
            }
            const [reason, advice] = ENDS.get(code);
            isOver = true;
            const again = document.createElement("a");
            again.href = location.pathname + location.search; // with a fragment it would lead to a place on this page
            again.textContent = words[advice];
            note.replaceChildren(`${say(reason, new Date())} `, again);
            return true;
        },
    };
};

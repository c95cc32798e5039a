// Says on a page that follows something when it is not current: nothing has come for a while, or its reader was signed out.
export const SIGNED_OUT = 4401; // close code of the socket
const SILENT_AFTER_MS = 15000; // something comes every two seconds
const LOOK_MS = 1000;

// Returns what to call when something has come, and when the server says that the reader is signed out.
export const watch = () => {
    // Empty and not hidden: screen readers say what changes in a status that is there, and not one that appears.
    const note = document.createElement("p");
    note.className = "silent";
    note.setAttribute("role", "status");
    document.body.append(note);
    let heardAt = new Date();
    let isSignedOut = false;
    const look = () => {
        if (isSignedOut) {
            return;
        }
        const isSilent = Date.now() - heardAt.getTime() >= SILENT_AFTER_MS;
        const text = `Not live: nothing has come from the control plane since ${heardAt.toLocaleTimeString()}. What you see may be old.`;
        const said = isSilent ? text : "";
        if (note.textContent !== said) {
            note.textContent = said;
        }
    };
    setInterval(look, LOOK_MS);
    return {
        heard: () => {
            heardAt = new Date();
            isSignedOut = false; // a page that the browser kept may find its reader signed in again
            look();
        },
        signedOut: () => {
            isSignedOut = true;
            const again = document.createElement("a");
            again.href = location.pathname + location.search; // with a fragment it would lead to a place on this page
            again.textContent = "Sign in again";
            note.replaceChildren(`Not live: you were signed out at ${new Date().toLocaleTimeString()}. `, again);
        },
    };
};

// Says on a page that follows something when it is not current: nothing has come for a while, or its reader was signed out.
export const SIGNED_OUT = 4401; // close code of the socket
const SILENT_AFTER_MS = 15000; // something comes every two seconds
const LOOK_MS = 1000;

// Returns what to call when something has come, and when the server says that the reader is signed out.
export const watch = () => {
    const note = document.createElement("p");
    note.className = "silent";
    note.setAttribute("role", "status");
    note.hidden = true;
    document.body.append(note);
    let heardAt = new Date();
    let isSignedOut = false;
    const look = () => {
        if (isSignedOut || Date.now() - heardAt.getTime() < SILENT_AFTER_MS) {
            note.hidden = !isSignedOut;
            return;
        }
        const text = `Not live: nothing has come from the control plane since ${heardAt.toLocaleTimeString()}. What you see may be old.`;
        note.hidden = false;
        if (note.textContent !== text) {
            note.textContent = text;
        }
    };
    setInterval(look, LOOK_MS);
    return {
        heard: () => {
            heardAt = new Date();
            look();
        },
        signedOut: () => {
            isSignedOut = true;
            const again = document.createElement("a");
            again.href = location.href;
            again.textContent = "Sign in again";
            note.replaceChildren(`Not live: you were signed out at ${new Date().toLocaleTimeString()}. `, again);
            note.hidden = false;
        },
    };
};

// Keeps the page of an open request current: asks for it again every two seconds, and loads it anew once the request has ended.
import { parse, updateChildren } from "./live.js";

const EVERY_MS = 2000;
const panel = document.getElementById("request");

const look = async () => {
    if (document.hidden) {
        return;
    }
    try {
        const answer = await fetch(location.href, { signal: AbortSignal.timeout(EVERY_MS) });
        const fresh = answer.ok ? parse(await answer.text()).getElementById("request") : null;
        if (fresh && !("open" in fresh.dataset)) {
            location.reload();
        } else if (fresh) {
            updateChildren(panel, fresh);
        }
    } catch {
        // The next one may get through.
    }
};

if (panel) {
    setInterval(look, EVERY_MS);
}

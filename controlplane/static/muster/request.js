// Keeps the page of an open request current: asks for it again every two seconds, and loads it anew once the request has ended.
import { parse, updateChildren } from "./live.js";

const EVERY_MS = 2000;
const PATIENCE_MS = 30000; // given up sooner, a busy control plane would be asked again and again and never heard
const panel = document.getElementById("request");
let isLooking = false;

const look = async () => {
    if (isLooking || document.hidden) {
        return;
    }
    isLooking = true;
    try {
        const answer = await fetch(location.href, { headers: { "X-Muster-Follow": "1" }, signal: AbortSignal.timeout(PATIENCE_MS) });
        const fresh = answer.ok ? parse(await answer.text()).getElementById("request") : null;
        if (fresh && !("open" in fresh.dataset)) {
            location.reload();
        } else if (fresh) {
            updateChildren(panel, fresh);
        }
    } catch {
        // The next one may get through.
    } finally {
        isLooking = false;
    }
};

if (panel) {
    setInterval(look, EVERY_MS);
}

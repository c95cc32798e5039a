// Keeps parts of a page of models current: what has data-follow is fetched again, and changed where it differs.
import { parse, update } from "./live.js";
import { watch } from "./silence.js";

const EVERY_MS = 5000;
const FAST_MS = 1500; // while something is being loaded
const PATIENCE_MS = 30000;

const followed = () => [...document.querySelectorAll("[data-follow]")];

if (followed().length > 0) {
    const silence = watch();
    const look = async () => {
        const address = new URL(location.href);
        const part = followed().find((element) => element.dataset.follow)?.dataset.follow;
        if (part) {
            new URLSearchParams(part).forEach((value, name) => address.searchParams.set(name, value));
        }
        const headers = { "X-Muster-Follow": "1" }; // whoever only leaves a page open is idle
        const answer = await fetch(address, { headers, signal: AbortSignal.timeout(PATIENCE_MS) });
        if (answer.redirected && new URL(answer.url).pathname !== location.pathname) {
            silence.signedOut();
        } else if (answer.ok) {
            silence.heard();
            const fresh = parse(await answer.text());
            for (const shown of followed()) {
                const news = fresh.getElementById(shown.id);
                if (news) {
                    update(shown, news);
                }
            }
        }
    };
    const wait = () => {
        const isFast = followed().some((element) => "fast" in element.dataset);
        setTimeout(async () => {
            if (!document.hidden) {
                try {
                    await look();
                } catch {
                    // The next one may get through; until then the page says since when it is old.
                }
            }
            wait();
        }, isFast ? FAST_MS : EVERY_MS);
    };
    wait();
}

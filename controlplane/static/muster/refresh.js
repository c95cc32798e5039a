// Whether this page may change by itself. The button in the top bar is there for pages that follow something.
let isPaused = false;
let isWired = false;

export const mayChange = () => !isPaused;

// Calls `resume` when the reader lets the page go on.
export const offerPause = (resume) => {
    addEventListener("muster:resumed", resume);
    const button = document.querySelector("[data-refresh]");
    if (!button || isWired) {
        return;
    }
    isWired = true;
    button.hidden = false;
    const show = () => {
        const label = isPaused ? button.dataset.goOn : button.dataset.pause;
        button.setAttribute("aria-pressed", String(isPaused));
        button.setAttribute("aria-label", label);
        button.title = label;
        button.firstElementChild.textContent = isPaused ? "play_arrow" : "pause";
    };
    button.addEventListener("click", () => {
        isPaused = !isPaused;
        show();
        if (!isPaused) {
            dispatchEvent(new Event("muster:resumed"));
        }
    });
    show();
};

// The playground: sends the form through the control plane, shows the answer as it comes, and the same question as code.
import { showAnswer } from "./playground-answer.js";
import { followCode } from "./playground-code.js";
import { compare } from "./playground-compare.js";
import { clearBlame, form, readForm, showFields, watchForm } from "./playground-form.js";
import { keepTurn, showTurns } from "./playground-turns.js";

const root = document.getElementById("playground");
const sendButton = document.getElementById("pg-send");
const stopButton = document.getElementById("pg-stop");
const stopButtons = document.querySelectorAll("[data-stop]");
const answer = document.getElementById("pg-answer");
let running = null;

// Swaps Send and Stop; the focus goes along, so that the keyboard never loses its place.
const showRunning = (isRunning) => {
    const hadFocus = [sendButton, ...stopButtons].includes(document.activeElement);
    sendButton.hidden = isRunning;
    for (const button of stopButtons) {
        button.hidden = !isRunning;
    }
    answer.setAttribute("aria-busy", String(isRunning));
    if (hadFocus) {
        (isRunning ? stopButton : sendButton).focus({ preventScroll: true });
    }
};

// On a narrow screen the answer stands below the form.
const showPlace = () => {
    if (answer.getBoundingClientRect().top > innerHeight / 2) {
        answer.scrollIntoView();
    }
};

const send = async () => {
    if (running !== null) {
        return;
    }
    clearBlame();
    running = new AbortController();
    showRunning(true);
    showPlace();
    try {
        const fields = readForm({ isWhole: true });
        showTurns();
        const [text] = await Promise.all([showAnswer(fields, running.signal), compare(fields, running.signal)]);
        keepTurn(fields.prompt, text);
    } finally {
        running = null;
        showRunning(false);
    }
};

form.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
});
form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        send();
    }
});
for (const button of stopButtons) {
    button.addEventListener("click", () => running?.abort());
}

showFields();
watchForm(Number(root.dataset.maxImage));
followCode(root.dataset.code);

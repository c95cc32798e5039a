// The turns of a conversation: kept in this page alone, sent with the next question, and shown above its answer.
const place = document.getElementById("pg-turns");
const list = document.getElementById("pg-turns-list");
let turns = [];

export const isConversing = () => document.querySelector("[name=converse]").checked;
export const readTurns = () => (isConversing() ? turns : []);

const show = () => {
    place.hidden = turns.length === 0;
    list.replaceChildren(
        ...turns.map(({ role, text }) => {
            const item = document.createElement("li");
            const who = document.createElement("b");
            who.textContent = role === "user" ? place.dataset.you : place.dataset.model;
            const said = document.createElement("div");
            said.className = "pg-said";
            said.textContent = text;
            item.className = `pg-turn pg-turn-${role}`;
            item.append(who, said);
            return item;
        }),
    );
};

// Keeps a question and its answer, and makes room for the next question.
export const keepTurn = (prompt, text) => {
    if (!isConversing() || text === "") {
        return;
    }
    turns = [...turns, { role: "user", text: prompt }, { role: "assistant", text }];
    const field = document.getElementById("pg-prompt");
    if (field.value === prompt) {
        field.value = "";
        field.dispatchEvent(new Event("change", { bubbles: true }));
    }
};

export const showTurns = show;

document.getElementById("pg-turns-new").addEventListener("click", () => {
    turns = [];
    show();
    document.getElementById("pg-prompt").focus();
});

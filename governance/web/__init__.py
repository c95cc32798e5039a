"""The pages of approvals, policy and freeze in the browser. They parse, call one function and render."""

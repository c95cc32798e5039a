"""What signing in needs beside passkeys: authenticator apps, and a brake on guessing."""

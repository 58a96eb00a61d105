// Runs one job on one of several tasuki node agents, and saves its result.
//
//     dotnet run -- http://n1:7090,http://n2:7090 JOB_ID book.csv result.zip [EXEC]
//
// TASUKI_TOKEN is sent as the token if it is set. docs/operate/agents-csharp.md explains each choice.

using System.Net.Http.Headers;
using System.Security.Cryptography;
using System.Text.Json;

if (args.Length is < 4 or > 5)
{
    Console.Error.WriteLine("usage: dotnet run -- NODE[,NODE...] JOB_ID FILE OUTPUT.zip [EXEC]");
    return 2;
}
var nodes = args[0].Split(',');
var (jobId, input, output) = (args[1], args[2], args[3]);
var exec = args.Length == 5 ? args[4] : null;

// A node answers when the program has ended, which may take 20 minutes; the default of HttpClient is 100 seconds.
using var http = new HttpClient { Timeout = TimeSpan.FromMinutes(21) };
if (Environment.GetEnvironmentVariable("TASUKI_TOKEN") is { Length: > 0 } token)
{
    http.DefaultRequestHeaders.Authorization = new AuthenticationHeaderValue("Bearer", token);
}

var deadline = DateTime.UtcNow + http.Timeout;
for (var pause = TimeSpan.FromSeconds(1); ; pause = pause < TimeSpan.FromSeconds(16) ? pause * 2 : pause)
{
    var isHopeful = false;
    foreach (var node in nodes)
    {
        var (next, words) = await RunAt(node.TrimEnd('/'));
        Console.Error.WriteLine($"job {jobId}: {node}: {words}");
        if (next == Next.Done) return 0;
        if (next == Next.GiveUp) return 1;
        isHopeful |= next == Next.Wait;
    }
    if (!isHopeful || DateTime.UtcNow + pause > deadline)
    {
        Console.Error.WriteLine($"job {jobId}: no node could run it; the same JOB_ID may be sent again");
        return 1;
    }
    await Task.Delay(pause);
}

// Sends the job to one node. The same id is never run twice by a node that has the result: it answers with what it stored.
async Task<(Next, string)> RunAt(string node)
{
    try
    {
        // A content is sent once; each try makes its own.
        using var form = new MultipartFormDataContent();
        form.Add(new StreamContent(File.OpenRead(input)), "file", Path.GetFileName(input));
        if (exec is not null) form.Add(new StringContent(exec), "exec");
        using var request = new HttpRequestMessage(HttpMethod.Post, $"{node}/run/{Uri.EscapeDataString(jobId)}") { Content = form };
        using var response = await http.SendAsync(request, HttpCompletionOption.ResponseHeadersRead);
        return response.IsSuccessStatusCode ? await Save(response) : await Judge(response);
    }
    catch (Exception error) when (error is HttpRequestException or IOException or TaskCanceledException)
    {
        return (Next.OtherNode, error.Message);
    }
}

// Saves the ZIP only if it has the sha256 that its ETag names, so that half a result is never taken for a whole one.
async Task<(Next, string)> Save(HttpResponseMessage response)
{
    var part = output + ".part";
    await using (var file = File.Create(part))
    {
        await response.Content.CopyToAsync(file);
    }
    await using (var file = File.OpenRead(part))
    {
        var sha256 = Convert.ToHexString(await SHA256.HashDataAsync(file)).ToLowerInvariant();
        if (response.Headers.ETag?.Tag != $"\"{sha256}\"") return (Next.OtherNode, "the result is not the one that its ETag names");
    }
    File.Move(part, output, overwrite: true);
    var leftOut = response.Headers.TryGetValues("Tasuki-Left-Out", out var counts) ? counts.First() : "0";
    return (Next.Done, leftOut == "0" ? $"saved as {output}" : $"saved as {output}, without {leftOut} files that were too large or too many");
}

async Task<(Next, string)> Judge(HttpResponseMessage response)
{
    var (status, code, words) = ((int)response.StatusCode, "", "");
    try
    {
        using var body = JsonDocument.Parse(await response.Content.ReadAsStringAsync());
        var error = body.RootElement.GetProperty("error");
        code = error.GetProperty("code").GetString() ?? "";
        words = error.GetProperty("message").GetString() ?? "";
    }
    catch (Exception error) when (error is JsonException or KeyNotFoundException or InvalidOperationException)
    {
        words = "an answer that is not a node agent's";
    }
    var next = (status, code) switch
    {
        (423, _) or (429, _) or (503, "FULL") => Next.Wait,
        (409, _) or (500, "PROGRAM_FAILED") => Next.GiveUp,
        (400, not "EXEC_NOT_ALLOWED") => Next.GiveUp,
        _ => Next.OtherNode,
    };
    return (next, $"{status} {code}: {words}");
}

enum Next { Done, Wait, OtherNode, GiveUp }
